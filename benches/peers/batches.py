"""dcp_rs in Python: reads batches of Arrow columns and counts their rows.

Input and output are as for the other clients (`count.rs`). A job for this client only may have
more: `stream` has options of the stream, `compressed` and `tls` are options of the connection, and
`parser` decodes each batch's documents outside the stream: `orjson` or `pyarrow`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time

import dcp_rs


def with_orjson(batch: dcp_rs.ChangeBatch) -> None:
    """Decodes the documents to objects."""
    import orjson

    for value in batch.to_pyarrow().column("value").to_pylist():
        orjson.loads(value)


def with_pyarrow(batch: dcp_rs.ChangeBatch) -> None:
    """Decodes the documents to columns."""
    import pyarrow.json

    values = batch.to_pyarrow().column("value").to_pylist()
    pyarrow.json.read_json(io.BytesIO(b"\n".join(values)))


PARSERS = {"orjson": with_orjson, "pyarrow": with_pyarrow}


def main() -> None:
    """Counts rows."""
    job = json.loads(sys.stdin.readline())
    credentials = {"username": job["username"], "password": job["password"]}
    options = {
        "bucket": job["bucket"],
        "buffer_size": job["buffer"],
        "compressed": job.get("compressed", False),
    }
    parse = PARSERS.get(job.get("parser"), lambda _: None)
    connection_string = job["connection_string"]
    with contextlib.ExitStack() as held:
        if job.get("tls", False):
            connection_string = job["tls_connection_string"]
            # Not for every run, whose processor time includes start-up.
            import tempfile
            from pathlib import Path

            # Read for each connection.
            options["tls_ca"] = Path(held.enter_context(tempfile.TemporaryDirectory()), "ca.pem")
            options["tls_ca"].write_text(job["ca_pem"])
        client = held.enter_context(dcp_rs.connect(connection_string, **options, **credentials))
        started = time.perf_counter()
        changes = size = 0
        with client.stream(until="now", **job.get("stream", {})) as stream:
            for batch in stream:
                changes += batch.num_rows
                size += batch.nbytes
                parse(batch)
        seconds = time.perf_counter() - started
    counted = {"line": "counted", "changes": changes, "bytes": size, "seconds": seconds}
    print(json.dumps(counted), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
