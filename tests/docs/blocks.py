"""The code of the site's pages, as it is printed."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n^```text\n(?P<shown>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of Python and the output that is shown below it."""

    page: str
    line: int
    code: str
    shown: str | None

    @property
    def is_spark(self):
        return re.search(r"\bspark\b", self.code) is not None

    @property
    def is_of_engines(self):
        """Whether it needs an engine that has an environment of its own, `tests/engines`."""
        return (
            re.search(r"^import (ray|dask|daft)\b|datafusion", self.code, re.MULTILINE) is not None
        )

    def run(self, names):
        """Runs it in the page's namespace and holds what it prints against what is shown."""
        # The line numbers of a traceback are those of the page.
        code = compile("\n" * self.line + self.code, ROOT / self.page, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if self.shown is not None:
            # There is no order between vBuckets, so the lines may come in another.
            lines = sorted(printed.getvalue().splitlines())
            assert lines == sorted(self.shown.splitlines()), (
                f"{self.page}:{self.line} prints\n{printed.getvalue()}"
            )


def blocks_of(page):
    text = (ROOT / page).read_text()
    found = [
        Block(
            page,
            text.count("\n", 0, match.start("code") - 1),
            match["code"],
            match["shown"],
        )
        for match in FENCE.finditer(text)
    ]
    assert len(found) == len(re.findall(r"^```python", text, re.MULTILINE)), (
        f"{page}: a fence is open"
    )
    return found


def pages():
    """Every page of the site that has a block of Python."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        str(page.relative_to(ROOT)) for page in candidates if "\n```python\n" in page.read_text()
    ]
