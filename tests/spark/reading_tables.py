"""Tables in S3 that Spark reads while `replicate` writes them.

`on_version.py` runs it.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import dcp_rs
import kept_tables

sys.path.append(str(Path(__file__).parents[1] / "python"))
import stores
from s3_server import S3Server

_POM = Path(__file__).with_name("s3") / "pom.xml"
# Versions between which a reader is to look.
_VERSIONS = 5
_PATIENCE = 300


class Stored:
    """A table in S3.

    Args:
        kind: Its format.
        mode: Its mode.
        place: A bucket, as `stores.s3` takes it.
        catalog: File of the catalog of Iceberg tables.
    """

    def __init__(self, kind, mode, place, catalog):
        self.kind, self.mode = kind, mode
        self._path = f"{place['bucket']}/{kind}-{mode}"
        if kind == "iceberg":
            self.url = f"iceberg+sqlite:///{catalog}?catalog=lake&table=travel.changes"
            self.options = {
                "warehouse": f"s3://{self._path}",
                "s3.access-key-id": "test",
                "s3.secret-access-key": stores.SECRET,
                "s3.region": "us-east-1",
                "s3.endpoint": place["endpoint"],
            }
        else:
            self.url = f"{kind}+s3://{self._path}"
            self.options = {
                "aws_access_key_id": "test",
                "aws_secret_access_key": stores.SECRET,
                "aws_region": "us-east-1",
                "aws_endpoint_url": place["endpoint"],
                "aws_allow_http": "true",
            }

    def documents(self, spark):
        """Gives what Spark finds: the newest value of each document."""
        if self.kind == "iceberg":
            rows = spark.table("lake.travel.changes")
        else:
            rows = spark.read.format(self.kind).load(f"s3a://{self._path}")
        # At once: what is asked later may see a later version.
        rows = rows.select("key", "seqno", "value").collect()
        assert len({row.seqno for row in rows}) == len(rows), "a row is doubled"
        named = sorted((row for row in rows if row.key is not None), key=lambda row: row.seqno)
        found = {row.key: json.loads(row.value)["n"] for row in named}
        assert self.mode == "log" or len(found) == len(rows), "a document is doubled"
        return found


def session(folder, server, catalog):
    """Starts Spark with what it reads the tables with."""
    jars = [kept_tables.jars(kind, folder) for kind in ("delta", "iceberg")]
    copy = ["mvn", "-B", "-q", "-f", _POM, "dependency:copy-dependencies"]
    subprocess.run([*copy, f"-DoutputDirectory={folder}/s3"], check=True)
    jars += map(str, Path(folder, "s3").glob("*.jar"))
    s3 = {
        "endpoint": server.address,
        "endpoint.region": "us-east-1",
        "access.key": "test",
        "secret.key": stores.SECRET,
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
    }
    lake = {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "jdbc",
        ".uri": f"jdbc:sqlite:{catalog}",
        ".warehouse": "s3://of-each-table",
        ".cache-enabled": "false",
    }
    return kept_tables.session(
        "delta",
        folder,
        **{f"spark.hadoop.fs.s3a.{name}": value for name, value in s3.items()},
        **{f"spark.sql.catalog.lake{name}": value for name, value in lake.items()},
        **{
            "spark.jars": ",".join(jars),
            "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        },
    )


def follow(spark, table):
    """Each read finds the documents as they were at some change, and the last read all."""
    numbers = itertools.count()
    # In one vBucket, changes come in the order in which they were made.
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:

        def write():
            for n in itertools.islice(numbers, 10):
                cluster.upsert(f"key_{n % 6}" if n % 2 else f"own_{n}", {"n": n})

        def replicate(**more):
            dcp_rs.replicate(
                client, table.url, mode=table.mode, storage_options=table.options, **more
            )

        write()
        replicate(once=True)
        stop = threading.Event()
        often = {"commit_rows": 3, "commit_interval": 0.05, "stop": stop}
        writing = threading.Thread(target=replicate, kwargs=often)
        writing.start()
        seen, before, end = set(), {}, time.monotonic() + _PATIENCE
        try:
            while len(seen) < _VERSIONS:
                assert writing.is_alive(), "it ended"
                assert time.monotonic() < end, "nobody reads between commits"
                write()
                found = table.documents(spark)
                newest = max(found.values())
                own = {key for key in found if key.startswith("own")}
                assert own == {f"own_{n}" for n in range(0, newest + 1, 2)}
                # A version may be left out of which there is a newer one, but none comes back.
                assert all(found[key] >= n for key, n in before.items())
                seen.add(newest)
                before = found
        finally:
            stop.set()
            writing.join()
        replicate(once=True)
        last = next(numbers)
        truth = {f"own_{n}": n for n in range(0, last, 2)}
        truth |= {f"key_{n % 6}": n for n in range(1, last, 2)}
        assert table.documents(spark) == truth


def everything():
    """Tries each table, one after the other."""
    os.environ["MOTO_ALLOW_NONEXISTENT_REGION"] = "true"
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(S3Server()) as server:
        catalog = f"{folder}/catalog.db"
        place = {"endpoint": server.address, "bucket": "lake"}
        stores.make_bucket(place)
        spark = session(folder, server, catalog)
        tables = [("delta", "table"), ("delta", "log"), ("parquet", "log"), ("iceberg", "log")]
        for kind, mode in tables:
            follow(spark, Stored(kind, mode, place, catalog))
        spark.stop()
