"""Runs the notebooks of docs/notebooks and saves their output: `make notebooks`.

The saved output is independent of the machine: paths, execution times and stderr are removed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs/notebooks"
SHOWN = ("image/png", "text/plain")


def run(path: Path) -> Any:
    """Returns a notebook with the output of every cell, run in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    # Make Spark's workers use this Python, not the first on the PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()
    notebook.metadata = {"language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [plain(each) for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def plain(output: Any) -> Any:
    """Removes parts of an output that only a browser shows."""
    if "data" in output:
        output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
        output.metadata = {}
    return output


def main() -> int:
    """Runs the given notebooks, or all."""
    names = sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    for name in names:
        path = NOTEBOOKS / f"{name}.ipynb"
        nbformat.write(run(path), path)
        print(f"{path.name}: run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
