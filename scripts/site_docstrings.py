"""Readies docstrings for the site: an extension of griffe, which mkdocstrings loads.

A docstring names a thing as `dcp_rs.Client.stream`, in backticks and nothing more, so that it reads
as well in `help()`. On the site each such name is a link, and a doctest is a block of code.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

NAME = re.compile(r"(?<![`\[])`(dcp_rs(?:\.\w+)+)`(?![`\]])")
DOCTEST = re.compile(r"^ *>>> .*\n?(?:^ *\S.*\n?|^\n(?=^ *\.\.\. ))*", re.MULTILINE)


def ready(text: str) -> str:
    """Makes a cross-reference of each name and a fenced block of each doctest."""
    parts, end = [], 0
    for doctest in DOCTEST.finditer(text):
        code = textwrap.dedent(doctest[0]).rstrip("\n")
        parts += [NAME.sub(r"[`\1`][\1]", text[end : doctest.start()]), f"```pycon\n{code}\n```\n"]
        end = doctest.end()
    return "".join([*parts, NAME.sub(r"[`\1`][\1]", text[end:])])


class ReadyDocstrings(griffe.Extension):
    """Rewrites every docstring that is loaded, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = ready(obj.docstring.value)
