"""Adds the repository's URL to a release.

Usage: scripts/add_urls.py URL

Writes `[project.urls]` into pyproject.toml, and turns the README's relative links into links to
this version's tag, so that they work on a package index. The release workflow runs it on its own
checkout, because only the workflow knows the URL. Running it again changes nothing.
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
    """Appends the table of URLs to the project's tables.

    Args:
        pyproject: Text of pyproject.toml.
        url: URL of the repository, without a trailing slash.
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
        url: URL of the repository, without a trailing slash.
        version: The version; links point to its tag.
    """
    return LINK.sub(rf"]({url}/blob/v{version}/\1)", readme)


def main() -> None:
    """Updates both files."""
    parser = argparse.ArgumentParser(description="Adds the repository's URL to a release.")
    parser.add_argument("url", metavar="URL", help="URL of the repository, https://...")
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
