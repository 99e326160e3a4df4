"""The figures of the documentation, docs/performance.json: tables in groups.

Each group says how it was measured. A benchmark replaces its groups, and draws their plots anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "performance.json"

STRING = r'"(?:[^"\\]|\\.)*"'
Table = dict[str, list[Any]]


def cells(line: str) -> list[str]:
    """Returns the cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def tables(lines: list[str]) -> list[Table]:
    """Returns the Markdown tables among these lines as columns and rows."""
    found: list[Table] = []
    is_inside = False
    for line in lines:
        if not line.startswith("|"):
            is_inside = False
        elif not is_inside:
            found.append({"columns": cells(line), "rows": []})
            is_inside = True
        elif not line.startswith("|---"):
            found[-1]["rows"].append(cells(line))
    return found


def load(document: Path = DOCUMENT) -> dict[str, dict[str, Any]]:
    """Returns all groups: what each was measured on and how, and its tables."""
    groups: dict[str, dict[str, Any]] = json.loads(document.read_text(encoding="utf-8"))
    return groups


def text_of(groups: dict[str, dict[str, Any]]) -> str:
    """Returns the groups as JSON with a line for each row of a table."""
    text = json.dumps(groups, indent=1, ensure_ascii=False)
    row = r"\[\s+(" + STRING + r"(?:,\s+" + STRING + r")*)\s+\]"
    return re.sub(row, lambda match: "[" + re.sub(r",\n\s+", ", ", match[1]) + "]", text) + "\n"


def record(group: str, about: str, lines: list[str], document: Path = DOCUMENT) -> list[Table]:
    """Replaces the tables of a group; returns them."""
    groups = load(document)
    if group not in groups:
        raise SystemExit(f"{document.name} has no group {group}")
    found = tables(lines)
    groups[group] = {"about": about, "tables": found}
    document.write_text(text_of(groups), encoding="utf-8")
    return found
