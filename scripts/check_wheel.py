"""Checks wheels: name, size, contents, metadata, and the glibc version required.

Usage: scripts/check_wheel.py [--platform TAG] [--urls] WHEEL...
       scripts/check_wheel.py --try     (writes and reads a document with the installed package)
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MAX_BYTES = 12_000_000
PACKAGES = ("dcp_rs", "pyspark_couchbase_dcp")
EXTENSION = "dcp_rs/_dcp_rs.abi3.so"
NEEDED = (EXTENSION, "dcp_rs/_dcp_rs.pyi", "dcp_rs/py.typed", "dcp_rs/pytest_plugin.py")
NEEDED_INFO = ("METADATA", "entry_points.txt", "licenses/LICENSE")
URLS = ("Homepage", "Documentation", "Changelog", "Source", "Issues")
# Number of a processor in the header of an ELF file, by its name in a tag.
MACHINES = {"x86_64": 62, "aarch64": 183}
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)")


def faults(wheel: Path, version: str, platform: str, *, urls: bool = False) -> list[str]:
    """Returns the problems of a wheel, one per line.

    Args:
        wheel: The file.
        version: Required version.
        platform: Required platform tag, such as `manylinux_2_17`; empty for any.
        urls: Whether the metadata must have the repository's URL.
    """
    found = []
    if not re.fullmatch(rf"dcp_rs-{re.escape(version)}-cp311-abi3-.*\.whl", wheel.name):
        found.append(f"its name is not that of an abi3 wheel of {version}")
    if platform not in wheel.name:
        found.append(f"its name lacks {platform}")
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        found.append(f"has {size:,} bytes, at most {MAX_BYTES:,}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"dcp_rs-{version}.dist-info/"
        needed = [*NEEDED, *(info + name for name in NEEDED_INFO)]
        found += [f"lacks {name}" for name in needed if name not in names]
        found += [f"should not have {name}" for name in names if _is_foreign(name, info)]
        if info + "METADATA" in names:
            found += _metadata(archive.read(info + "METADATA"), urls=urls)
        wanted = _MANYLINUX.search(platform)
        if wanted and EXTENSION in names:
            extension = archive.read(EXTENSION)
            for machine, number in MACHINES.items():
                has_number = extension[18:20] == number.to_bytes(2, "little")
                if wheel.stem.endswith(machine) and not has_number:
                    found.append(f"its extension is not for {machine}")
            needs = {(int(a), int(b)) for a, b in _GLIBC.findall(extension)}
            most = max(needs, default=(0, 0))
            if most > (int(wanted[1]), int(wanted[2])):
                found.append(f"its extension needs glibc {most[0]}.{most[1]}")
    return found


def _is_foreign(name: str, info: str) -> bool:
    is_ours = name.startswith((*(f"{package}/" for package in PACKAGES), info))
    is_extension = name.endswith((".so", ".dylib", ".pyd"))
    return not is_ours or name.endswith(".pyc") or (is_extension and name != EXTENSION)


def _metadata(data: bytes, *, urls: bool) -> list[str]:
    metadata = BytesParser().parsebytes(data)
    found = []
    wanted = {
        "Name": "dcp-rs",
        "License-Expression": "Apache-2.0",
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }
    for field, value in wanted.items():
        given = str(metadata[field])
        if not given.startswith(value):
            found.append(f"METADATA: {field} is {given}, not {value}")
    found += [
        f"METADATA: requires {each} without an extra"
        for each in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in each
    ]
    found += [f"METADATA: lacks {field}" for field in ("Keywords", "Classifier", "Summary")
              if not metadata[field]]  # fmt: skip
    named = [each.partition(", ")[0] for each in metadata.get_all("Project-URL", [])]
    if urls:
        found += [f"METADATA: lacks the URL {name}" for name in URLS if name not in named]
        if "](docs/" in str(metadata.get_payload()):
            found.append("METADATA: links of its description lead to files that are not there")
    if not str(metadata.get_payload()).lstrip().startswith("# dcp_rs"):
        found.append("METADATA: the README is not its description")
    return found


def try_installed() -> None:
    """Writes a document to an embedded cluster and reads it, with the installed package."""
    import dcp_rs

    with dcp_rs.testing.EmbeddedCluster() as cluster, cluster.connect() as client:
        cluster.upsert("key", {"n": 1})
        (row,) = [row for batch in client.stream(until="now") for row in batch]
        if row["value"] != b'{"n":1}':
            sys.exit(f"read {row}")
    print(f"dcp_rs {dcp_rs.__version__} of {dcp_rs.__file__} reads what was written")


def main() -> int:
    """Checks the given wheels."""
    parser = argparse.ArgumentParser(description="Checks wheels.")
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument("--platform", default="", help="required tag, such as manylinux_2_17")
    parser.add_argument("--urls", action="store_true", help="require URLs in the metadata")
    parser.add_argument("--try", action="store_true", dest="tries")
    given = parser.parse_args()
    if given.tries:
        try_installed()
        return 0
    if not given.wheels:
        parser.error("no wheel is named: nothing would be checked")
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    version = manifest["workspace"]["package"]["version"]
    is_wrong = False
    for wheel in given.wheels:
        for fault in faults(wheel, version, given.platform, urls=given.urls):
            is_wrong = True
            print(f"{wheel.name}: {fault}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
