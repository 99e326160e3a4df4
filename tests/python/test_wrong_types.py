"""Every public parameter, given what it is not, says so by its name and in our own words."""

import inspect
import math
import re

import pytest

import dcp_rs
from dcp_rs import debug, planner, replication, testing
from dcp_rs.exceptions import DcpError

# No parameter takes these, so that the error has to begin with its name.
NEVER_RIGHT = [object(), ..., 1 << 70, math.nan, [object()], "\ud800"]
# Some take these. Who does not has to say so in an error of ours.
SELDOM_RIGHT = [
    None,
    True,
    -1,
    0,
    "no such thing",
    b"\xff",
    (1, "a"),
    {"a": object()},
    {object(): 1},
]
# What the interpreter or the extension module says about the arguments of functions.
NOT_OURS = re.compile(r"^argument |has no attribute|not iterable|_inner")
# Arguments that are right, for those that have to be given; the fixture `of` makes the objects.
GIVEN = {
    "connection_string": lambda of: of["cluster"].connection_string,
    "client": lambda of: of["client"],
    "options": lambda _: planner.PlanOptions(persisted_only=False),
    "start": lambda of: of["planner"].earliest(),
    "end": lambda of: of["planner"].earliest(),
    "tasks": lambda _: 1,
    "key": lambda _: "key",
    "value": lambda _: b"{}",
    "vbucket": lambda _: 0,
    "replica": lambda _: 1,
    "lag": lambda _: 0,
    "to": lambda _: 0,
    "node": lambda _: 0,
    "nodes": lambda _: [0],
    "scope": lambda _: "scope",
    "collection": lambda _: "collection",
    "rules": lambda _: [],
    "password": lambda _: "password",
    "text": lambda of: of["checkpoint"].to_json(),
    "path": lambda of: of["path"],
    "checkpoint": lambda of: of["checkpoint"],
    "other": lambda of: of["checkpoint"],
    "vbuckets": lambda _: [0],
    "batch": lambda of: of["batch"],
    "data": lambda _: b"",
    "url": lambda of: f"parquet://{of['path']}",
    "target": lambda of: f"parquet://{of['path']}",
    "failover_log": lambda _: [(1, 0)],
    "high_seqno": lambda _: 1,
    "member": lambda _: 0,
    "of": lambda _: 1,
    "num_vbuckets": lambda _: 2,
    "vbuuid": lambda _: 1,
    "start_seqno": lambda _: 0,
    "snapshot_start": lambda _: 0,
    "snapshot_end": lambda _: 0,
}
# What the text begins with, where it is not the parameter.
SAID = {
    ("DocumentSchema", "schema"): "document_schema",
    ("Checkpoint.from_json", "text"): ("text", "the checkpoint is damaged"),
    ("Partition.from_json", "text"): ("text", "the read plan is damaged"),
    # It is `target` to those who call `replicate`.
    ("open_target", "url"): "target",
}
PLAIN = {
    "dcp_rs.connect": lambda _: dcp_rs.connect,
    "Client.stream": lambda of: of["client"].stream,
    "Client.plan": lambda of: of["client"].plan,
    "Client": lambda _: dcp_rs.Client,
    "Schema": lambda _: dcp_rs.Schema,
    "DocumentSchema": lambda _: _documents,
    "Share": lambda _: dcp_rs.Share,
    "Share.vbuckets": lambda _: dcp_rs.Share(0, of=2).vbuckets,
    "BatchPolicy": lambda _: dcp_rs.BatchPolicy,
    "Checkpoint.from_json": lambda _: dcp_rs.Checkpoint.from_json,
    "Checkpoint.load": lambda _: dcp_rs.Checkpoint.load,
    "Checkpoint.save": lambda of: of["checkpoint"].save,
    "Checkpoint.restricted_to": lambda of: of["checkpoint"].restricted_to,
    "Checkpoint.merged_with": lambda of: of["checkpoint"].merged_with,
    "FileStore": lambda _: dcp_rs.FileStore,
    "FileStore.save": lambda of: dcp_rs.FileStore(of["path"]).save,
    "MemoryStore.save": lambda _: dcp_rs.MemoryStore().save,
    "ChangeStream.ack": lambda of: of["stream"].ack,
    "replicate": lambda _: _replicate,
    "open_target": lambda _: replication.open_target,
    "Decoder": lambda _: debug.Decoder,
    "Decoder.feed": lambda _: debug.Decoder().feed,
    "debug.decode": lambda _: debug.decode,
    "explain_rollback": lambda _: debug.explain_rollback,
    "PlanOptions": lambda of: (
        lambda **options: of["planner"].end(
            of["planner"].earliest(), planner.PlanOptions(**options)
        )
    ),
    "Planner": lambda _: planner.Planner,
    "Partition.open": lambda of: of["partition"].open,
    "Partition.from_json": lambda _: dcp_rs.Partition.from_json,
    "Limits": lambda _: testing.Limits,
    "EmbeddedCluster": lambda _: _start,
    "EmbeddedCluster.connect": lambda of: of["cluster"].connect,
}
OBJECTS = {"planner": planner.Planner, "cluster": testing.EmbeddedCluster}
# They warn of themselves first.
DEPRECATED = {"Planner.tasks"}
METHODS = {
    f"{each.__name__}.{name}": (of, name)
    for of, each in OBJECTS.items()
    for name, method in inspect.getmembers(each, callable)
    if not name.startswith("_") and f"{each.__name__}.{name}" not in {*PLAIN, *DEPRECATED}
}


def _documents(schema=None, prefix="", on_malformed="null"):
    return dcp_rs.Schema(document_schema=dcp_rs.DocumentSchema(schema, prefix, on_malformed))


def _replicate(client, target, **options):
    """Comes to an end, whatever it is given."""
    return dcp_rs.replicate(client, target, **{"mode": "log", "once": True} | options)


_replicate.__signature__ = inspect.signature(dcp_rs.replicate)


def _start(**options):
    with testing.EmbeddedCluster(**options):
        pass


_start.__signature__ = inspect.signature(testing.EmbeddedCluster)


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    with (
        testing.EmbeddedCluster(vbuckets=2) as cluster,
        cluster.connect(retry_timeout=0.2) as client,
    ):
        cluster.upsert("key", b"{}")
        stream = client.stream(until="now", ack="manual")
        batch = next(stream)
        planned = planner.Planner(client)
        planned.observe()
        yield {
            "cluster": cluster,
            "client": client,
            "planner": planned,
            "partition": planned.plan(options=GIVEN["options"](None)).partitions[0],
            "stream": stream,
            "batch": batch,
            "checkpoint": batch.checkpoint,
            "path": tmp_path_factory.mktemp("wrong") / "file",
        }
        stream.close()


def fault(call, name, arguments, each, wrong):
    """What is wrong with the answer to one wrong argument; `None` if nothing is."""
    try:
        result = call(**arguments | {each: wrong})
    except DcpError as error:
        text = str(error)
        is_named = text.startswith(SAID.get((name, each), each))
        is_fault = NOT_OURS.search(text) or (wrong in NEVER_RIGHT and not is_named)
        return repr(error) if is_fault else None
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        return repr(error)
    if isinstance(result, dcp_rs.ChangeStream | dcp_rs.Client):
        result.close()
    return "taken" if wrong in NEVER_RIGHT else None


@pytest.mark.parametrize("name", [*PLAIN, *METHODS])
def test_what_is_of_a_wrong_type_is_refused_in_our_words(of, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    owner, method = METHODS.get(name, (None, None))
    call = PLAIN[name](of) if owner is None else getattr(of[owner], method)
    named = {
        each: parameter
        for each, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    needed = {
        each: GIVEN[each](of)
        for each, parameter in named.items()
        if parameter.default is parameter.empty
    }
    faults = [
        f"{each}={wrong!r}: {found}"
        for each in named
        for wrong in NEVER_RIGHT + SELDOM_RIGHT
        if (found := fault(call, name, needed, each, wrong)) is not None
    ]
    assert faults == [], "\n".join(faults)
