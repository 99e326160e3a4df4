"""Tries versions of PySpark other than that of the tests, each in an environment of its own.

`make long` runs it with the wheel. It downloads half a gigabyte for each version, and Delta's
jar from Maven Central.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TRIED = {
    "pyspark==4.0.0 pandas==2.2.0 pyarrow==18.0.0": ["batch", "mapped", "view", "stream"],
    "pyspark==4.1.*": ["batch", "mapped", "view", "stream"],
    "pyspark==4.2.*": ["batch", "mapped", "view", "stream"],
    "pyspark==4.2.0 delta-spark==4.4.0 deltalake==1.6.6": ["delta"],
    "pyspark==4.3.* deltalake==1.6.6": ["merge"],
    # A format at a time, since a process has one Spark. DCP_SPARK_KILLS=60 kills as often.
    "pyspark==4.0.5 deltalake==1.6.6": ["delta_tables", "iceberg_tables"],
    "pyspark==4.1.4 deltalake==1.6.6": ["iceberg_tables"],
    "pyspark==4.2.* deltalake==1.6.6": ["delta_tables"],
    "pyspark[connect]==4.2.*": ["connect"],
    "pyspark[connect]==4.3.*": ["connect"],
    "pyspark[pipelines]==4.3.*": ["pipeline"],
}
PROGRAM = Path(__file__).with_name("on_version.py")


def main():
    wheel, *chosen = sys.argv[1:]
    for version, names in TRIED.items():
        if chosen and version not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            python = Path(folder, "bin", "python")
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run(
                [*pip, *version.split(), f"dcp-rs[spark] @ file://{Path(wheel).resolve()}"],
                check=True,
            )
            subprocess.run([python, PROGRAM, *names], check=True)


if __name__ == "__main__":
    main()
