"""Each call of the Couchbase Go SDK is answered as docs/guides/sdks.md says.

With the environment variable `DCP_SDK_TABLE` set, as `make sdk-table` sets it, the table is written
instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import answers
from programs import ForeignClient, Program

from dcp_rs.testing import EmbeddedCluster

# The fixture builds the program, which takes as long as it takes.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(120, func_only=True)]

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
        shown = {line["name"]: line["answer"] or line["failure"] for line in lines}
        answers.write(BEGIN, END, shown)
    return {line["name"]: line for line in lines}


def said() -> dict[str, str]:
    """The table of the guide."""
    return answers.read(BEGIN, END)


def test_the_guide_names_every_call_and_no_other(lines):
    assert set(said()) == set(lines)


@pytest.mark.parametrize("name", list(said()))
def test_a_call_is_answered_as_the_guide_says(lines, name):
    line = lines[name]
    assert not line["failure"]
    assert line["answer"] == said()[name], "run `make sdk-table` if this is as it should be"
    assert not line["answer"].startswith("not available") or line["seconds"] < AT_ONCE
