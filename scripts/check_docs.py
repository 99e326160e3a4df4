"""Checks how many words the docs have, and that they answer the questions of their readers.

Words are those that somebody wrote: not those of code, of its output, and of what is generated. The
questions are links of docs/questions.md, each to the heading below which the answer is.

Usage: scripts/check_docs.py [FOLDER]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MOST_WORDS = 38_000
MOST_WORDS_OF_A_GUIDE = 1_200
FEWEST_QUESTIONS = 60

_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"<!--[^>]*generated[^>]*-->.*?<!-- end[^>]*-->", re.DOTALL)
_QUESTION = re.compile(r"^[*-] \[([^\]]+\?)\]\(([^)#]+)#?([^)]*)\)", re.MULTILINE)


def words(text: str) -> int:
    """Counts the words of a page that somebody wrote."""
    return len(_GENERATED.sub("", _CODE.sub("", text)).split())


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as its site has them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", _CODE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


def too_long(docs: Path) -> list[str]:
    """Says what is too long."""
    counts = {path: words(path.read_text(encoding="utf-8")) for path in docs.rglob("*.md")}
    found = [
        f"{path.relative_to(docs)}: {count:,} words, at most {MOST_WORDS_OF_A_GUIDE:,}: make it two"
        for path, count in sorted(counts.items())
        if path.parent.name == "guides" and count > MOST_WORDS_OF_A_GUIDE
    ]
    total = sum(counts.values())
    print(f"docs: {total:,} words of {MOST_WORDS:,}")
    if total > MOST_WORDS or not counts:
        found.append(f"{total:,} words on all pages, at most {MOST_WORDS:,}: leave something out")
    return found


def unanswered(docs: Path) -> list[str]:
    """Says which questions have no answer, or that there are too few."""
    found = []
    questions = _QUESTION.findall((docs / "questions.md").read_text(encoding="utf-8"))
    for question, page, anchor in questions:
        path = docs / page
        if not path.is_file():
            found.append(f"{question} there is no page {page}")
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            found.append(f"{question} {page} has no heading {anchor}")
    asked = {question for question, _, _ in questions}
    if len(asked) != len(questions):
        found.append("a question is asked twice")
    if len(asked) < FEWEST_QUESTIONS:
        found.append(f"{len(asked)} questions, at least {FEWEST_QUESTIONS}")
    print(f"docs: {len(asked)} questions")
    return found


def main(arguments: list[str]) -> int:
    """Prints what is wrong; returns the exit code."""
    docs = Path(arguments[0]) if arguments else ROOT / "docs"
    found = too_long(docs) + unanswered(docs)
    for line in found:
        print(line)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
