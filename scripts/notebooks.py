"""Runs the notebooks of docs/notebooks again and writes what they print: `make notebooks`.

What is committed names no machine: paths, times of execution and standard error are left out.
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
    """Gives a notebook with the output of every cell, run in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    # Spark's workers are to be this Python, not the first on the PATH.
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
    """Leaves out of an output what only a browser shows."""
    if "data" in output:
        output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
        output.metadata = {}
    return output


def main() -> int:
    """Runs all notebooks, or those that are named."""
    names = sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    for name in names:
        path = NOTEBOOKS / f"{name}.ipynb"
        nbformat.write(run(path), path)
        print(f"{path.name}: run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
