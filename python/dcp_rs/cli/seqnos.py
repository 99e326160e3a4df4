"""`dcp-rs seqnos` and `dcp-rs lag`: high seqnos, and how far behind a reader is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dcp_rs._claims import in_ranges
from dcp_rs.cli._options import command, connection_options, output_options, vbuckets_option
from dcp_rs.cli._output import print_records
from dcp_rs.cli._reader import reader_options
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from dcp_rs.cli._reader import Reader
    from dcp_rs.connection import ConnectionOptions


@command()
@connection_options
@vbuckets_option
@output_options
def seqnos(connection: ConnectionOptions, vbuckets: set[int] | None, *, as_json: bool) -> None:
    """Show the highest seqno of each vBucket, and its node."""
    with Client(connection) as client:
        high = client.high_seqnos()
        nodes = {vb: node for node, held in client.vbuckets_by_node().items() for vb in held}
        chosen = _chosen(client, high, vbuckets)
    records: list[dict[str, object]] = [
        {"vbucket": vbucket, "node": nodes.get(vbucket), "high_seqno": high[vbucket]}
        for vbucket in chosen
    ]
    print_records(["vbucket", "node", "high_seqno"], records, as_json=as_json)


@command()
@connection_options
@reader_options(required=True)
@vbuckets_option
@output_options
def lag(
    connection: ConnectionOptions,
    reader: Reader,
    vbuckets: set[int] | None,
    *,
    as_json: bool,
) -> None:
    """Show how many seqnos a reader is behind.

    Prints the lag of each vBucket and, last, the total, whose vBucket is null. Older versions of
    documents and collections that the reader leaves out have seqnos too, so there may be fewer
    changes to come. A replication with --listen also says for how many seconds it has been behind.
    """
    with Client(connection) as client:
        # Before the server's seqnos, so that a running reader is not ahead of them.
        read, ages = reader.position(client)
        high = client.high_seqnos()
        chosen = _chosen(client, high, vbuckets)
    records = [_record(vb, read.get(vb, 0), high[vb]) for vb in chosen]
    total: dict[str, object] = {"vbucket": None}
    for name in ("seqno", "high_seqno", "lag"):
        total[name] = sum(int(str(record[name])) for record in records)
    if ages is not None:
        for vbucket, record in zip(chosen, records, strict=True):
            record["lag_seconds"] = ages.get(vbucket, 0.0)
        total["lag_seconds"] = max((ages.get(vbucket, 0.0) for vbucket in chosen), default=0.0)
    columns = ["vbucket", "seqno", "high_seqno", "lag"] + ["lag_seconds"] * (ages is not None)
    shown = {} if as_json else {"vbucket": "all"}
    print_records(columns, [*records, total | shown], as_json=as_json)
    ahead = [vb for vb in chosen if read.get(vb, 0) > high[vb]]
    if ahead:
        print(
            f"dcp-rs: the reader is ahead of the server in vBuckets {ahead}:"
            " a failover has lost changes, and it will be rolled back",
            file=sys.stderr,
        )


def _chosen(client: Client, high: dict[int, int], vbuckets: set[int] | None) -> list[int]:
    unknown = (vbuckets or set()) - set(range(client.num_vbuckets))
    if unknown:
        last = client.num_vbuckets - 1
        raise ConfigError(
            f"{in_ranges(unknown)} do not exist: the bucket has the vBuckets 0-{last}",
            option="vbuckets",
        )
    return sorted(high if vbuckets is None else vbuckets & high.keys())


def _record(vbucket: int, seqno: int, high_seqno: int) -> dict[str, object]:
    behind = max(high_seqno - seqno, 0)
    return {"vbucket": vbucket, "seqno": seqno, "high_seqno": high_seqno, "lag": behind}
