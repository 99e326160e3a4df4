"""An embedded producer in a process of its own, full of documents, until standard input ends.

Takes what it is to hold as a JSON line and prints the job for readers as a JSON line.
"""

from __future__ import annotations

import json
import sys

import dcp_rs


def main() -> None:
    """Holds documents."""
    wanted = json.loads(sys.stdin.readline())
    value = json.dumps({"body": "a" * (wanted["value_len"] - 12)}).encode()
    options = {"vbuckets": wanted["vbuckets"], "nodes": wanted["nodes"], "tls": wanted["tls"]}
    with dcp_rs.Producer(memory_quota=1 << 40, **options) as producer:
        write = {}
        if wanted["collection"]:
            producer.create_scope("measured")
            producer.create_collection("measured.documents")
            write["collection"] = "measured.documents"
        if wanted["xattrs"]:
            write["xattrs"] = {"meta": {"source": "bench", "rank": 1}}
        for number in range(wanted["documents"]):
            producer.upsert(f"key-{number:015}", value, **write)
        producer.persist()
        tls = wanted["tls"]
        job = {
            "connection_string": producer.tls_connection_string
            if tls
            else producer.connection_string,
            "ca": str(producer.ca_file) if tls else None,
            "bucket": producer.bucket_name,
            "username": "Administrator",
            "password": "password",
        }
        print(json.dumps(job), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
