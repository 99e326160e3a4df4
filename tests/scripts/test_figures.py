"""The figures of the pages: tables that benchmarks replace, and plots that are drawn of them."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benches/peers"))

import figures
import plot

LINES = [
    "| 256 B | s | CPU s |",
    "|---|---|---|",
    "| ours | 1.00 | 0.10 |",
    "| theirs | 2 | 3 |",
    "",
]
TABLE = {
    "columns": ["256 B", "s", "CPU s"],
    "rows": [["ours", "1.00", "0.10"], ["theirs", "2", "3"]],
}


@pytest.fixture
def document(tmp_path):
    return Path(shutil.copy(figures.DOCUMENT, tmp_path))


def test_a_group_is_replaced_and_the_others_stay(document):
    before = figures.load(document)
    assert figures.record("peers", "of today", LINES * 2, document) == [TABLE, TABLE]
    groups = figures.load(document)
    assert groups.pop("peers") == {"about": "of today", "tables": [TABLE, TABLE]}
    before.pop("peers")
    assert groups == before
    assert len(groups) > 20
    with pytest.raises(SystemExit, match="no group peeers"):
        figures.record("peeers", "of today", LINES, document)


def test_the_document_is_what_recording_writes():
    assert figures.text_of(figures.load()) == figures.DOCUMENT.read_text()
    text = figures.text_of({"a": {"about": 'quoted "x", y', "tables": [TABLE]}})
    assert '["theirs", "2", "3"]' in text
    assert json.loads(text)["a"]["tables"] == [TABLE]


@pytest.mark.parametrize("group", plot.PLOTS)
def test_a_plot_is_drawn_of_the_tables(group, tmp_path):
    file = plot.PLOTS[group].file
    plot.draw(group, figures.load()[group]["tables"], tmp_path)
    assert (tmp_path / file).read_text() == (plot.DOCS / file).read_text()
