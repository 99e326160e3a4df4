"""Gives a release the address of its repository.

Usage: scripts/add_urls.py URL

Writes `[project.urls]` into pyproject.toml, and turns the README's links to other files into links
to the tag of this version, so that they work on a package index. The release workflow runs it on
its own checkout, because only it knows the address. Running it again changes nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMMENT = re.compile(r"^# No URLs:.*\n", re.MULTILINE)
TABLE = "[project.urls]"
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def with_urls(pyproject: str, url: str) -> str:
    """Adds the table of URLs, behind the other tables of the project.

    Args:
        pyproject: Text of pyproject.toml.
        url: Address of the repository, without a slash at the end.
    """
    if TABLE in pyproject:
        return pyproject
    urls = {
        "Homepage": url,
        "Documentation": f"{url}/tree/HEAD/docs",
        "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
        "Source": url,
        "Issues": f"{url}/issues",
    }
    table = "\n".join([TABLE, *(f'{name} = "{each}"' for name, each in urls.items()), "", ""])
    before, scripts, after = COMMENT.sub("", pyproject).partition("[project.scripts]")
    return before + table + scripts + after


def with_links(readme: str, url: str, version: str) -> str:
    """Makes relative links absolute.

    Args:
        readme: Text of README.md.
        url: Address of the repository, without a slash at the end.
        version: Version, whose tag the links lead to.
    """
    return LINK.sub(rf"]({url}/blob/v{version}/\1)", readme)


def main() -> None:
    """Changes both files."""
    parser = argparse.ArgumentParser(description="Gives a release the address of its repository.")
    parser.add_argument("url", metavar="URL", help="address of the repository, https://...")
    url = parser.parse_args().url.rstrip("/")
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", url):
        sys.exit(f"{url!r} is not the https address of a repository")
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    version = manifest["workspace"]["package"]["version"]
    pyproject, readme = ROOT / "pyproject.toml", ROOT / "README.md"
    pyproject.write_text(with_urls(pyproject.read_text(), url))
    readme.write_text(with_links(readme.read_text(), url, version))


if __name__ == "__main__":
    main()
