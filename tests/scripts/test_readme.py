"""What the README and the other pages name and link to. Their code runs in tests/docs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_target_that_is_mentioned_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    mentioned = set()
    for page in ("README.md", "CONTRIBUTING.md"):
        mentioned |= set(
            re.findall(r"(?:^ {4}|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE)
        )
    assert len(mentioned) >= 5
    assert mentioned <= targets


def test_every_link_between_the_pages_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    checked = 0
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            checked += 1
    assert checked > 8
