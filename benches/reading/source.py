"""An embedded producer in its own process, filled with documents; runs until stdin ends.

Reads its contents as a JSON line and prints the job for readers as a JSON line.
"""

from __future__ import annotations

import json
import random
import string
import sys
from typing import Any

import dcp_rs


def bodies(length: int, *, words: bool) -> list[bytes]:
    """Returns JSON documents of a length: one, or several with words, which are compressible."""
    if not words:
        return [json.dumps({"body": "a" * (length - 12)}).encode()]
    rng = random.Random(1)  # noqa: S311 (the same each time)
    known = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(500)]
    texts = (" ".join(rng.choices(known, k=length)) for _ in range(256))
    return [json.dumps({"body": text[: length - 12]}).encode() for text in texts]


def main() -> None:
    """Runs the producer."""
    wanted = json.loads(sys.stdin.readline())
    values = bodies(wanted["value_len"], words=wanted["words"])
    options = {"vbuckets": wanted["vbuckets"], "nodes": wanted["nodes"], "tls": wanted["tls"]}
    with dcp_rs.testing.EmbeddedCluster(
        limits=dcp_rs.testing.Limits(memory_quota=1 << 40), **options
    ) as producer:
        write: dict[str, Any] = {}
        collections = [f"measured.c{number:03}" for number in range(wanted["collections"])]
        if collections:
            producer.create_scope("measured")
        for collection in collections:
            producer.create_collection(collection)
        if wanted["xattrs"]:
            write["xattrs"] = {"meta": {"source": "bench", "rank": 1}}
        for number in range(wanted["documents"]):
            if collections:
                write["collection"] = collections[number % len(collections)]
            producer.upsert(f"key-{number:015}", values[number % len(values)], **write)
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
            "high_seqnos": producer.high_seqnos(),
        }
        print(json.dumps(job), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
