"""Stores of every kind, each as a process of its own opens it."""

import functools
import json
import sqlite3
from pathlib import Path

import dcp_rs

KINDS = ["file", "sqlite", "postgres", "objects"]


def where(kind, request, tmp_path):
    """Describes an empty store, in text for `opened`."""
    if kind == "postgres":
        return {"kind": kind, "dsn": request.getfixturevalue("postgres_database")}
    if kind == "objects":
        return {"kind": kind, **request.getfixturevalue("s3_bucket")}
    return {"kind": kind, "path": str(tmp_path / "positions")}


def opened(place):
    """Opens a store, as another reader would."""
    match place["kind"]:
        case "file":
            return dcp_rs.FileStore(place["path"])
        case "sqlite":
            return dcp_rs.SqlStore(lambda: sqlite3.connect(place["path"], timeout=30))
        case "postgres":
            import psycopg

            return dcp_rs.SqlStore(lambda: psycopg.connect(place["dsn"]))
        case "objects":
            return dcp_rs.ObjectStore(s3(place), "readers/orders")
    raise AssertionError(place)


SECRET = "canary-8f1c2e of storage"
"""Secret of the access key `test`, which moto does not look at."""


@functools.cache
def _server(endpoint):
    import boto3

    names = {"service_name": "s3", "endpoint_url": endpoint, "region_name": "us-east-1"}
    return boto3.client(**names, aws_access_key_id="test", aws_secret_access_key=SECRET)


def make_bucket(place):
    _server(place["endpoint"]).create_bucket(Bucket=place["bucket"])


def s3(place):
    from obstore.store import S3Store

    return S3Store(
        place["bucket"],
        endpoint=place["endpoint"],
        access_key_id="test",
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )


# For programs of their own.
IMPORT = f"""
import json, sys
sys.path.insert(0, {json.dumps(str(Path(__file__).parent))})
import stores
"""
