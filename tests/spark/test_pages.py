"""The pages whose blocks need Spark, run as printed in the session that is there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from blocks import blocks_of


def test_the_readme_runs_with_spark(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of("README.md")
    assert sum(block.is_spark for block in blocks) == 2
    names = {"__name__": "page"}
    for block in blocks:
        block.run(names)
    assert names["spark"] is spark
    names["client"].close()
    names["cluster"].close()
