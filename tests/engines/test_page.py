"""The page of engines, whose blocks run as printed in an environment that has all of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from blocks import blocks_of


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    blocks = blocks_of("docs/guides/engines.md")
    assert sum(block.is_of_engines for block in blocks) == 4
    for block in blocks:
        block.run(names)
