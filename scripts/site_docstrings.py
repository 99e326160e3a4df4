"""Prepares docstrings for the site: a griffe extension loaded by mkdocstrings.

Docstrings refer to an object as `dcp_rs.Client.stream`, in plain backticks, which also reads well
in `help()`. On the site each such name becomes a link, and a doctest a code block.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

NAME = re.compile(r"(?<![`\[])`(dcp_rs(?:\.\w+)+)`(?![`\]])")
DOCTEST = re.compile(r"^ *>>> .*\n?(?:^ *\S.*\n?|^\n(?=^ *\.\.\. ))*", re.MULTILINE)


def ready(text: str) -> str:
    """Turns names into cross-references and doctests into fenced code blocks."""
    parts, end = [], 0
    for doctest in DOCTEST.finditer(text):
        code = textwrap.dedent(doctest[0]).rstrip("\n")
        parts += [NAME.sub(r"[`\1`][\1]", text[end : doctest.start()]), f"```pycon\n{code}\n```\n"]
        end = doctest.end()
    return "".join([*parts, NAME.sub(r"[`\1`][\1]", text[end:])])


class ReadyDocstrings(griffe.Extension):
    """Rewrites every loaded docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = ready(obj.docstring.value)
