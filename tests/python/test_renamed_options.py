"""Old names of options work for one release, with a warning at the line that has them."""

from dataclasses import replace

import pytest

import dcp_rs
from dcp_rs.cli import _program
from dcp_rs.exceptions import ConfigError
from dcp_rs.planner import Planner, PlanOptions
from dcp_rs.spark import ReadOptions

SPARK = {"connectionString": "couchbase://localhost/travel"}


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"allow_data_loss": True}, "on_purge", "resync"),
        ({"allow_data_loss": False}, "on_purge", "fail"),
        ({"max_rows": 5}, "max_seqnos", 5),
    ],
)
def test_plan_knows_old_names(given, name, value):
    (old,) = given
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated: use {name}") as seen:
        options = PlanOptions(**given)
    assert (getattr(options, name), seen[0].filename) == (value, __file__)
    with pytest.warns(DeprecationWarning, match=old):
        assert getattr(options, old) == given[old]
    with pytest.raises(ConfigError, match=f"^{name}, {old}: "):
        PlanOptions(**given, **{name: value})


@pytest.mark.parametrize(
    ("old", "given", "name", "value"),
    [
        ("failOnDataLoss", "false", "on_purge", "resync"),
        ("failondataloss", True, "on_purge", "fail"),
        ("maxRowsPerTrigger", "7", "max_offsets_per_trigger", 7),
    ],
)
def test_spark_knows_old_names(old, given, name, value):
    with pytest.warns(DeprecationWarning, match="is deprecated: use ") as seen:
        options = ReadOptions.parse(SPARK | {old: given})
    assert (getattr(options, name), seen[0].filename) == (value, __file__)
    with pytest.raises(ConfigError, match=f"^{old[:4]}(?i:{old[4:]}): is given twice"):
        ReadOptions.parse(SPARK | {old: given, old.upper(): given})
    new = "onPurge" if name == "on_purge" else "maxOffsetsPerTrigger"
    with pytest.raises(ConfigError, match=f"^{new}, "):
        ReadOptions.parse(SPARK | {old: given, new: str(value)})


@pytest.mark.parametrize(
    ("options", "old", "new", "before", "after"),
    [
        (PlanOptions(max_seqnos=3, is_last=True), "max_rows", "max_seqnos", 3, 5),
        (PlanOptions(), "max_rows", "max_seqnos", None, 5),
        (PlanOptions(), "allow_data_loss", "on_purge", "fail", True),
        (
            ReadOptions.parse(SPARK),
            "max_rows_per_trigger",
            "max_offsets_per_trigger",
            None,
            7,
        ),
    ],
)
def test_options_are_replaced_by_their_old_names(options, old, new, before, after):
    with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated: use {new}") as seen:
        replaced = replace(options, **{old: after})
    assert seen[0].filename == __file__
    value = "resync" if after is True else after
    assert (getattr(options, new), getattr(replaced, new)) == (before, value)
    assert replaced == replace(options, **{new: value}) != options
    with pytest.raises(ConfigError, match=f"^{new}, {old}: "):
        replace(options, **{old: after, new: "other"})


def test_stream_knows_old_name(cluster):
    with cluster.connect() as client:
        with pytest.warns(DeprecationWarning, match="use on_purge='ignore'"):
            client.stream(until="now", ignore_purged_tombstones=True).close()
        with pytest.raises(ConfigError, match=r"^ignore_purged_tombstones: must be True or False"):
            client.stream(ignore_purged_tombstones=1)
        with pytest.raises(ConfigError, match=r"^on_purge, ignore_purged_tombstones: "):
            client.stream(ignore_purged_tombstones=True, on_purge="resync")


def test_stream_cannot_fail_at_a_purge(cluster):
    with cluster.connect() as client, pytest.raises(ConfigError, match=r"^on_purge: ") as caught:
        client.stream(on_purge="fail")
    assert (caught.value.option, caught.value.value) == ("on_purge", "fail")


def test_plan_cannot_ignore_a_purge(cluster):
    options = PlanOptions(on_purge="ignore", persisted_only=False)
    with cluster.connect() as client:
        planner = Planner(client)
        with pytest.raises(ConfigError, match=r"^on_purge: ") as caught:
            planner.end(planner.earliest(), options)
    assert caught.value.value == "ignore"


def test_command_line_knows_old_name(cluster, monkeypatch, capsys):
    monkeypatch.setenv("DCP_RS_PASSWORD", "canary-8f1c2e")
    words = ["cat", f"{cluster.connection_string}/default", "--username", "Administrator"]
    _program.run([*words, "--ignore-purged-tombstones"])
    said = "dcp-rs: --ignore-purged-tombstones is deprecated: use --on-purge ignore"
    assert said in capsys.readouterr().err
    assert _program.run([*words, "--ignore-purged-tombstones", "--on-purge", "resync"]) == 1
    assert "--on-purge, --ignore-purged-tombstones: " in capsys.readouterr().err


def test_partitions_know_old_name():
    with (
        pytest.warns(DeprecationWarning, match="since is deprecated: use start") as seen,
        pytest.raises(ConfigError, match="connectionString"),
    ):
        dcp_rs.spark.partitions({}, since="earliest")
    assert seen[0].filename == __file__
