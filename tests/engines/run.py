"""Tests with engines that are too large for the environment of the other tests.

`make long` runs it with the wheel: it makes an environment, which takes a gigabyte.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ENGINES = ["ray[data]==2.60.*", "dask[dataframe]==2026.8.*", "daft==0.7.26", "datafusion==55.*"]
OTHERS = ["duckdb==2.0.*", "pandas==3.*", "pytest==9.*", "pytest-timeout==2.*"]
TESTS = Path(__file__).parent


def main():
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *ENGINES, *OTHERS, f"dcp-rs[ray] @ file://{wheel}"], check=True)
        tests = [python, "-m", "pytest", "-W", "ignore", "--rootdir", TESTS, "-c", "/dev/null"]
        done = subprocess.run([*tests, "--timeout", "1200", TESTS], check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
