"""Keyword arguments that do not exist."""

import inspect
import re

import pytest

import dcp_rs
from dcp_rs.planner import PlanOptions
from dcp_rs.testing import EmbeddedCluster


@pytest.mark.parametrize(
    ("call", "given", "meant"),
    [
        (lambda **given: dcp_rs.connect("couchbase://h", **given), "user", "username"),
        (lambda **given: dcp_rs.connect_async("couchbase://h", **given), "user", "username"),
        (
            lambda **given: dcp_rs.ConnectionOptions(connection_string="h", **given),
            "buckt",
            "bucket",
        ),
        (lambda **given: dcp_rs.Client.stream(None, **given), "collection", "collections"),
        (lambda **given: dcp_rs.Client.stream(None, **given), "untill", "until"),
        (lambda **given: dcp_rs.AsyncClient.stream(None, **given), "untill", "until"),
        (lambda **given: dcp_rs.replicate(None, "x", **given), "schema", "document_schema"),
        (dcp_rs.BatchPolicy, "max_row", "max_rows"),
        (lambda **given: dcp_rs.DocumentSchema("a INT", **given), "prefixx", "prefix"),
        (PlanOptions, "persisted", "persisted_only"),
        (EmbeddedCluster, "vbucket", "vbuckets"),
    ],
)
def test_the_nearest_name_is_suggested(call, given, meant):
    hint = f"unexpected keyword argument '{given}'; did you mean '{meant}'?"
    with pytest.raises(TypeError, match=re.escape(hint)):
        call(**{given: 1})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'qqq'$"):
        call(qqq=1)


def test_a_word_of_several_names_suggests_each():
    with pytest.raises(TypeError, match=r"; did you mean 'drop_fields' or 'hash_fields'\?$"):
        dcp_rs.Client.stream(None, fields=["a"])


def test_functions_still_tell_what_they_take():
    assert "username" in inspect.signature(dcp_rs.connect).parameters
    assert list(inspect.signature(dcp_rs.Client.stream).parameters)[:2] == ["self", "start"]
    assert dcp_rs.connect.__name__ == "connect"
    assert dcp_rs.connect.__doc__.startswith("Connects to a bucket.")
    assert "bucket" in inspect.signature(dcp_rs.ConnectionOptions).parameters


def test_an_option_of_the_plan_is_none_of_its_partitions(client, cluster):
    cluster.upsert("a", b"{}")
    (partition, *_) = client.plan(persisted_only=False).partitions
    with pytest.raises(TypeError, match=r"'collections': .* as in client.plan\(collections=...\)"):
        partition.open(client, collections="a")
