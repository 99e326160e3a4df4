"""The pages whose blocks need Spark, run as printed in the session that is there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import pytest
from blocks import blocks_of


@pytest.mark.default_password
@pytest.mark.parametrize(
    ("page", "count"),
    [("README.md", 2), ("docs/guides/spark.md", 4), ("docs/guides/spark-tables.md", 1)],
)
def test_a_page_runs_with_spark(page, count, spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(page)
    assert sum(block.is_spark for block in blocks) >= count
    names = {"__name__": "page"}
    try:
        for block in blocks:
            block.run(names)
        assert names["spark"] is spark
    finally:
        for name in ("client", "cluster"):
            if name in names:
                names[name].close()
