"""Each call of the Couchbase Go SDK is answered as docs/guides/sdks.md says.

With the environment variable `DCP_SDK_TABLE` set, as `make sdk-table` sets it, the table is written
instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import ForeignClient, Program

from dcp_rs.testing import EmbeddedCluster

# The fixture builds the program, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(120, func_only=True)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "sdks.md"
BEGIN, END = "<!-- generated from the Go SDK -->", "<!-- end of what is generated from it -->"
# Seconds, well below the shortest time-out of the SDK, which is 2.5.
AT_ONCE = 2.0
IMPOSSIBLE = "a durability level with too few nodes: `ErrDurabilityImpossible`"
TLS = "connecting with `couchbases://`"


def make_calls(program: Path, cluster: EmbeddedCluster, *calls: str, tls: bool = False):
    """What the SDK's program printed of its calls: all of them, or those that are named."""
    client = ForeignClient(Program("Go SDK", [str(program)], does_many=False), vbuckets=16)
    return client.start(cluster, tls=tls, calls=list(calls)).finish().of("call")


@pytest.fixture(scope="module")
def lines(go_programs):
    """A line for each call, by its name."""
    program = go_programs / "gocb"
    with EmbeddedCluster(nodes=2, replicas=1, vbuckets=16) as cluster:
        lines = make_calls(program, cluster)
    with EmbeddedCluster(replicas=1, vbuckets=16) as lonely:
        lines += make_calls(program, lonely, IMPOSSIBLE)
    with EmbeddedCluster(nodes=2, vbuckets=16, tls=True) as cluster:
        (line,) = make_calls(program, cluster, "`Exists`", tls=True)
        lines.append({**line, "name": TLS})
    if os.environ.get("DCP_SDK_TABLE"):
        rows = [f"| {line['name']} | {line['answer'] or line['failure']} |" for line in lines]
        table = "\n".join([BEGIN, "", "| call | answer |", "|---|---|", *rows, "", END])
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.split(BEGIN)[0] + table + page.split(END)[1], encoding="utf-8")
    return {line["name"]: line for line in lines}


def said() -> dict[str, str]:
    """The table of the guide."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return dict(rows[1:])


def test_the_guide_names_every_call_and_no_other(lines):
    assert list(said()) == list(lines)


@pytest.mark.parametrize("name", list(said()))
def test_a_call_is_answered_as_the_guide_says(lines, name):
    line = lines[name]
    assert not line["failure"]
    assert line["answer"] == said()[name], "run `make sdk-table` if this is as it should be"
    assert not line["answer"].startswith("not available") or line["seconds"] < AT_ONCE
