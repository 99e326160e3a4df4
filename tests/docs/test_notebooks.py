"""The notebooks print what is committed. That of Spark is run by `make notebooks` only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs/notebooks"


def cells(name):
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def shown(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


# Each in a process of its own: what Matplotlib and a kernel leave behind concerns no other test.
RUN = """
import contextlib, io, json, sys, warnings
printed, names = [], {"__name__": "__main__"}
for source in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(source, names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@pytest.mark.parametrize("name", ["polars", "duckdb"])
def test_a_notebook_prints_what_is_committed(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    sources = json.dumps(["".join(cell["source"]) for cell in cells(name)])
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=sources,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == [shown(cell) for cell in cells(name)]
    assert sum(map(bool, printed)) >= 3


@pytest.mark.parametrize("name", ["polars", "duckdb", "spark"])
def test_a_notebook_has_a_plot_and_names_no_machine(name):
    text = (NOTEBOOKS / f"{name}.ipynb").read_text()
    assert "image/png" in text
    assert len(text) < 60_000
    for place in ("/tmp/", "/root", "/home", "/work", "Traceback"):
        assert place not in text
