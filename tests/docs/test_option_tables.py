"""The page of options says what the code has."""

import sys
from pathlib import Path

import pytest

import dcp_rs
from dcp_rs.cli import export
from dcp_rs.spark import ReadOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import option_tables


def test_the_tables_of_options_are_those_of_the_code():
    page = option_tables.PAGE.read_text(encoding="utf-8")
    assert option_tables.with_tables(page) == page, "run `make option-tables`"


def test_each_option_of_python_and_spark_is_in_a_table():
    lines = "\n".join(line for lines in option_tables.tables().values() for line in lines)
    assert lines.count("\n") > 80
    spark = option_tables.options_of_spark()
    assert len(spark) == len(ReadOptions.__dataclass_fields__)
    assert [name for name in spark if f"`{name}`" not in lines] == []
    for function in (dcp_rs.connect, dcp_rs.Client.stream, dcp_rs.replicate):
        names = [each.name for each in option_tables.options_of(function)]
        assert [name for name in names if f"`{name}`" not in lines] == []


def test_a_row_has_what_each_of_them_calls_an_option():
    stream = {each.name: each for each in option_tables.options_of(dcp_rs.Client.stream)}
    (row,) = option_tables.rows([stream["on_purge"]], export.export.params)
    assert row == (
        "| [`on_purge`](../concepts/rollback.md#purged-deletions) | What to do if the server has"
        " purged deletions above the position (`resync`, `ignore`) | `resync` | `--on-purge`"
        " | `onPurge` (`fail`) | yes |"
    )
    (row,) = option_tables.rows([stream["hash_key"]], export.export.params)
    assert row.endswith("| | `--hash-key-env`, `--hash-key-file` | `hashKey` | yes |")


@pytest.mark.parametrize("name", ["prefix", "on_malformed"])
def test_a_sentence_ends_where_it_does(name):
    found = {each.name: each for each in option_tables.options_of(dcp_rs.DocumentSchema)}
    assert found[name].sentence
    assert ". " not in found[name].sentence
