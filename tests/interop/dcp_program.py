"""Reads a bucket with dcp_rs and prints what it is given as JSON lines.

Standard input tells a job: `Job` in go/session/job.go says what one may ask for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import dcp_rs
from dcp_rs.exceptions import ClosedError, DcpError

PRINTING = threading.Lock()


def say(kind: str, **fields: Any) -> None:
    # In one piece: two threads print.
    text = json.dumps({"line": kind, **fields}) + "\n"
    with PRINTING:
        sys.stdout.write(text)
        sys.stdout.flush()


def tell(row: dict[str, Any]) -> None:
    """Prints a row."""
    if row["op"] == "rollback":
        say("rollback", vb=row["vbucket"], to=row["seqno"])
        return
    value = row["value"] or b""
    say(
        "change",
        vb=row["vbucket"],
        op=row["op"],
        seqno=row["seqno"],
        key=row["key"],
        cas=row["cas"],
        collection=row["collection_id"],
        xattrs=sorted(dict(row["xattrs"] or {})),
        size=len(value),
        crc=zlib.crc32(value),
    )


def close_at_ends(stream: dcp_rs.ChangeStream, closed: threading.Event) -> None:
    """Closes the stream as soon as it is where standard input tells it to end."""
    while any(each.state != "streaming" for each in stream.vbucket_stats()):
        time.sleep(0.02)
    say("streaming")
    text = sys.stdin.readline()
    if not text:
        return
    ends = {int(vbucket): seqno for vbucket, seqno in json.loads(text).items()}
    while True:
        at = stream.checkpoint().seqnos
        if all(at.get(vbucket, 0) >= end for vbucket, end in ends.items()):
            closed.set()
            stream.close()
            return
        time.sleep(0.02)


def options_of(job: dict[str, Any]) -> dict[str, Any]:
    """The options of the stream that a job asks for."""
    columns = ["op", "key", "value", "vbucket", "seqno", "cas", "collection_id", "xattrs"]
    # With attributes, without which the server sends no body of a deletion.
    options: dict[str, Any] = {"columns": columns, "batch": dcp_rs.BatchPolicy(linger=0.02)}
    if job.get("resume"):
        options["start"] = dcp_rs.Checkpoint.load(job["resume"])
    if not job.get("follow"):
        options["until"] = "now"
    if job.get("collection_names"):
        options["collections"] = [f"{job['scope']}.{name}" for name in job["collection_names"]]
    if job.get("unacknowledged"):
        options |= {"ack": "manual", "batch": dcp_rs.BatchPolicy(linger=0.02, max_rows=1)}
    return options


def take(stream: dcp_rs.ChangeStream, batch: dcp_rs.ChangeBatch, unacknowledged: str) -> None:
    """Prints a batch, and acknowledges it where that is for the program to do."""
    if unacknowledged and batch[0]["key"] == unacknowledged:
        say("unacknowledged", vb=batch[0]["vbucket"], seqno=batch[0]["seqno"])
        return
    for row in batch.rows():
        tell(row)
    if unacknowledged:
        stream.ack(batch)


def read(job: dict[str, Any]) -> None:
    """Does a job."""
    client = dcp_rs.connect(
        f"couchbase://{','.join(job['nodes'])}/{job['bucket']}",
        username=job["username"],
        password=job["password"],
        noop_interval=job.get("noop_seconds") or 20,
    )
    unacknowledged = job.get("unacknowledged", "")
    with client, client.stream(**options_of(job)) as stream:
        closed = threading.Event()
        if job.get("follow"):
            arguments = (stream, closed)
            threading.Thread(target=close_at_ends, args=arguments, daemon=True).start()
        try:
            for batch in stream:
                take(stream, batch, unacknowledged)
        except ClosedError:
            if not closed.is_set():
                raise
        checkpoint = stream.checkpoint()
    if job.get("save"):
        checkpoint.save(job["save"])
    for vbucket, seqno in checkpoint.seqnos.items():
        say("vbucket", vb=vbucket, seqno=seqno)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    try:
        read(job)
    except DcpError as error:
        say("done", error=f"{type(error).__name__}: {error}")
    else:
        say("done", error="")
    # The process ends here and now, whatever is still open.
    os._exit(9 if job.get("unacknowledged") else 0)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    main()
