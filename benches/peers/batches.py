"""dcp_rs in Python: batches of Arrow columns, of which the rows are counted.

Job in and count out are as for the other clients (`count.rs`).
"""

from __future__ import annotations

import json
import sys
import time

import dcp_rs


def main() -> None:
    """Counts."""
    job = json.loads(sys.stdin.readline())
    credentials = {"username": job["username"], "password": job["password"]}
    options = {"bucket": job["bucket"], "buffer_size": job["buffer"]}
    with dcp_rs.connect(job["connection_string"], **options, **credentials) as client:
        started = time.perf_counter()
        changes = size = 0
        with client.stream(until="now") as stream:
            for batch in stream:
                changes += batch.num_rows
                size += batch.nbytes
        seconds = time.perf_counter() - started
    counted = {"line": "counted", "changes": changes, "bytes": size, "seconds": seconds}
    print(json.dumps(counted), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
