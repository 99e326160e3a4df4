"""Builds the documentation site into .state/site: `make site`.

The pages are where readers of the repository expect them: README.md and CHANGELOG.md at the top,
the rest in docs/. This script collects them in .state/site-source, with README.md as the start
page, and adjusts the links between them; then Zensical builds the site. Any warning is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / ".state/site-source"
# Pages outside of docs/, with their paths on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "docs/decisions": "decisions/index.md",
}
# Linked files that are not pages; they are copied unchanged.
FILES = {"LICENSE": "LICENSE"} | {
    str(path.relative_to(ROOT)): str(path.relative_to(ROOT))
    for pattern in ("examples/*.py", "deploy/*/*.yml", "deploy/*/*.json")
    for path in sorted(ROOT.glob(pattern))
}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")


def place(path: str) -> str | None:
    """Returns the path on the site of a file of the repository; `None` if it has none."""
    path = path.rstrip("/")
    known = ELSEWHERE.get(path) or FILES.get(path)
    return known or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def with_links(text: str, origin: str) -> str:
    """Adjusts the links of a page to the paths on the site."""
    here = place(origin)
    if here is None:
        raise SystemExit(f"site: {origin} has no place on the site")

    def mend(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(Path(origin).parent / target)
        there = place(path)
        if there is None:
            raise SystemExit(f"site: {origin} links to {path}, which is not on the site")
        return before + os.path.relpath(there, Path(here).parent) + after

    # Skip code blocks.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(mend, part) for part in parts)


def from_notebook(path: Path) -> str:
    """Renders a notebook as a page: its cells with their output, images embedded."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if picture := data.get("image/png"):
                source = "data:image/png;base64," + picture.replace("\n", "")
                parts.append(f'<img alt="The plot of the cell above" src="{source}">')
            else:
                shown = "".join(data["text/plain"]).rstrip()
                parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def decisions() -> str:
    """Renders the page that lists the decisions."""
    pages = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    titles = ((page.name, page.read_text().splitlines()[0].lstrip("# ")) for page in pages)
    lines = (f"* [{title}]({name})" for name, title in titles)
    return "# Decisions\n\nWhy things are as they are, with the date of each.\n\n" + "\n".join(
        lines
    )


def stage() -> None:
    """Collects the pages."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("*.ipynb"))
    for page in SOURCE.rglob("*.md"):
        origin = f"docs/{page.relative_to(SOURCE)}"
        page.write_text(with_links(page.read_text(), origin))
    for origin, name in ELSEWHERE.items():
        if origin.endswith(".md"):
            (SOURCE / name).write_text(with_links((ROOT / origin).read_text(), origin))
    for notebook in (ROOT / "docs/notebooks").glob("*.ipynb"):
        page = SOURCE / "notebooks" / f"{notebook.stem}.md"
        page.write_text(from_notebook(notebook))
    for origin, name in FILES.items():
        (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / origin, SOURCE / name)
    (SOURCE / "decisions/index.md").write_text(decisions() + "\n")


def not_in_navigation(nav: object, pages: set[str]) -> set[str]:
    """Returns the pages missing from the navigation; decisions are linked from their list."""
    listed = set(re.findall(r"'([^']+\.md)'", repr(nav)))
    return {page for page in pages - listed if not page.startswith("decisions/")}


def main() -> int:
    """Collects the pages and builds the site."""
    stage()
    settings = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    pages = {str(page.relative_to(SOURCE)) for page in SOURCE.rglob("*.md")}
    if missing := not_in_navigation(settings["nav"], pages):
        print(f"site: not in the nav of zensical.toml: {', '.join(sorted(missing))}")
        return 1
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run(
        [zensical, "build", "--clean", "--strict"], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
