"""Checks the built site: `make site-check`. Does not use the network.

Every link within the site must lead to an existing file and anchor, no page or style sheet may load
anything from elsewhere, and each picture has a text for those who do not see it. `--self-test`
verifies that each kind of violation is detected.
"""

from __future__ import annotations

import re
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parents[1] / ".state/site"
# Tags that make a browser load a resource.
LOADS = {"script", "img", "iframe", "link", "source"}
# Links to other sites that the generator adds to every page.
IGNORED_RELATIONS = {"canonical"}


class Page(HTMLParser):
    """Anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {""}
        self.links: list[tuple[str, str]] = []
        self.without_text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records the links and anchors of a tag."""
        values = dict(attrs)
        for name in ("id", "name"):
            if value := values.get(name):
                self.anchors.add(value)
        if tag == "img" and not values.get("alt"):
            self.without_text.append(values.get("src") or "")
        for name in ("href", "src"):
            value = values.get(name)
            if value and values.get("rel") not in IGNORED_RELATIONS:
                self.links.append((tag, value))


def of_sheets_and_pictures(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Returns the problems of style sheets and of pictures."""
    elsewhere = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")
    return [
        f"{sheet.relative_to(site)}: {link}: loaded from elsewhere"
        for sheet in site.rglob("*.css")
        for link in elsewhere.findall(sheet.read_text())
    ] + [
        f"{path.relative_to(site)}: {source[:60]}: a picture without a text"
        for path, page in pages.items()
        for source in page.without_text
    ]


def problems(site: Path) -> tuple[list[str], int]:
    """Returns the problems of a site, and the number of links checked."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    found, checked = of_sheets_and_pictures(site, pages), 0
    for path, page in pages.items():
        for tag, link in page.links:
            where = f"{path.relative_to(site)}: {link}"
            parts = urlsplit(link)
            if parts.scheme in {"data", "mailto"}:
                continue
            if parts.scheme or parts.netloc:
                if tag in LOADS:
                    found.append(f"{where}: loaded from elsewhere")
                continue
            checked += 1
            # 404.html is served at any path, so its links start at the root.
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{where}: no such file")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where}: no such anchor")
        if re.search(
            r"\]\[dcp_rs|\[`dcp_rs", re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        ):
            found.append(f"{path.relative_to(site)}: a reference that was not made a link")
    return found, checked


def self_test() -> None:
    """Checks a site with one mistake of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder).resolve()
        (site / "a.html").write_text(
            '<p id="x"><a href="b.html">1</a><a href="#y">2</a><a href="#x">right</a>'
            '<script src="https://example.org/s.js"></script>[`dcp_rs.connect`][dcp_rs.connect]'
            '<img src="data:,"><img src="data:," alt="A picture">'
        )
        (site / "a.css").write_text("@font-face { src: url('//example.org/a.woff2') }")
        found, checked = problems(site)
        kinds = sorted(problem.rpartition(": ")[2] for problem in found)
        assert kinds == [  # noqa: S101 - this is a test
            "a picture without a text",
            "a reference that was not made a link",
            "loaded from elsewhere",
            "loaded from elsewhere",
            "no such anchor",
            "no such file",
        ], found
        assert checked == 3  # noqa: S101 - this is a test


def main() -> int:
    """Checks the site that `make site` built."""
    if "--self-test" in sys.argv:
        self_test()
        return 0
    found, checked = problems(SITE)
    for problem in found:
        print(problem)
    if not checked:
        print(f"{SITE} has no page: run `make site` first")
        return 1
    print(f"{checked} links of the site checked, {len(found)} wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
