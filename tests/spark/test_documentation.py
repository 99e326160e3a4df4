"""What the guides list is what there is."""

import json
import re
from pathlib import Path

import dcp_rs
import versions

DOCS = Path(__file__).parents[2] / "docs"


def first_column(path, section=""):
    """The names in the first column of a guide's first table, from a section on."""
    text = path.read_text()
    text = text[text.index(section) :]
    table = re.search(r"^\|[^\n]*\n\|---.*?(?=^[^|])", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `(\w+)`", table.group(), flags=re.MULTILINE)


def test_the_change_table_lists_every_column():
    assert first_column(DOCS / "change-table.md") == [column.name for column in dcp_rs.columns()]


def test_the_guide_has_the_versions_that_ran():
    noted = json.loads(versions.NOTED.read_text())
    assert versions.table(noted) in versions.GUIDE.read_text(), "run `make spark-table`"


def test_the_versions_that_ran_are_those_that_are_pinned():
    pinned = {
        re.search(r"^pyspark==(\S+)", path.read_text(), re.MULTILINE)[1]
        for path in (DOCS.parent / "requirements").glob("*.txt")
        if path.stem == "test" or path.stem.startswith("spark-")
    }
    ran = {each["pyspark"] for each in json.loads(versions.NOTED.read_text())}
    assert ran <= pinned, "run `make spark-versions`"
