"""What the guides list is what there is."""

import json
import re
from dataclasses import fields
from pathlib import Path

import dcp_rs
import versions
from dcp_rs.spark import ReadOptions
from dcp_rs.spark.options import _camel

DOCS = Path(__file__).parents[2] / "docs"


def first_column(path, section=""):
    """The names in the first column of a guide's first table, from a section on."""
    text = path.read_text()
    text = text[text.index(section) :]
    table = re.search(r"^\|[^\n]*\n\|---.*?(?=^[^|])", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `(\w+)`", table.group(), flags=re.MULTILINE)


def test_the_page_of_options_has_every_option_of_spark():
    text = (DOCS / "reference" / "options.md").read_text()
    tables, alone = text.split("Spark alone has")
    rows = re.findall(r"^\| `\w+` \|.*?\| (.*?) \|", tables, re.MULTILINE)
    rows += re.findall(r"^\| `\w+` \|.*?\| (.*?) \|", alone.split("## Renamed")[0], re.MULTILINE)
    listed = [
        name for each in [*rows, alone.split(":")[0]] for name in re.findall(r"`(\w+)`", each)
    ]
    options = {_camel(each.name) for each in fields(ReadOptions)}
    assert len(options) > 15
    assert options - set(listed) == set()
    assert set(listed) - options <= {"fail"}, "a default beside a name"


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
