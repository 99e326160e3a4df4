"""Users who may read a table and not write it: `keeping_tables.py` runs this.

As a program, it is such a user: to whom the modes of folders apply, even to root.
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pyspark.errors import PySparkException

import dcp_rs.spark
import kept_tables

READ_ONLY, WRITABLE = 0o555, 0o755


def give_up_rights():
    """Takes from this process, and those that it starts, what lets root write anywhere."""
    set_capability, write_anywhere = 24, 1
    ctypes.CDLL(None).prctl(set_capability, write_anywhere, 0, 0, 0)


def folders(location):
    return [each for each in (location, *location.rglob("*")) if each.is_dir()]


def refused_of_files(folder, options, location, checkpoint):
    """Gives what a user is told who may not write: to a table, its log, or the folder of tables."""
    command = [sys.executable, "-W", "ignore", __file__]
    job = json.dumps([str(folder), options, str(location), str(checkpoint)])
    done = subprocess.run(
        command,
        input=job,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=give_up_rights,
    )
    for each in (location.parent, *folders(location)):
        each.chmod(WRITABLE)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def be_refused(folder, options, location, checkpoint):
    spark = kept_tables.session("delta", folder)
    location, told = Path(location), []

    def run(name, checkpoint):
        sink = dcp_rs.spark.merge_into(table=f"spark_catalog.default.{name}")
        try:
            kept_tables.run(spark, options, checkpoint, sink)
        except PySparkException as error:
            told.append(str(error))
        else:
            told.append("")

    for each in folders(location):
        each.chmod(READ_ONLY)
    run(location.name, checkpoint)
    location.chmod(WRITABLE)
    run(location.name, checkpoint)
    location.parent.chmod(READ_ONLY)
    run("another", f"{checkpoint}-of-another")
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()
    os._exit(0)


class Catalog(ThreadingHTTPServer):
    """An Iceberg REST catalog with one table, whose users may read only.

    Attributes:
        table: Folder of the table.
        refused: Paths of the requests that were refused.
    """

    def __init__(self, table):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.table, self.refused = Path(table), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def settings(self, name):
        """The settings of a session for the catalog."""
        of = f"spark.sql.catalog.{name}"
        return {
            of: "org.apache.iceberg.spark.SparkCatalog",
            f"{of}.type": "rest",
            f"{of}.uri": self.url,
        }


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/v1/config"):
            self._send(200, {"defaults": {}, "overrides": {}})
        elif self.path.partition("?")[0].endswith("/tables/kept"):
            (newest,) = sorted(self.server.table.glob("metadata/*.metadata.json"))[-1:]
            metadata = json.loads(newest.read_text())
            self._send(200, {"metadata-location": str(newest), "metadata": metadata})
        elif "/tables" in self.path:
            self._refuse(404, "NoSuchTableException", "there is no such table")
        else:
            self._send(200, {"namespace": ["travel"], "properties": {}})

    def do_HEAD(self):
        is_there = "/tables/" not in self.path or self.path.endswith("/tables/kept")
        self.send_response(204 if is_there else 404)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.refused.append(self.path)
        self._refuse(403, "ForbiddenException", "the user may only read")

    def _refuse(self, status, kind, message):
        self._send(status, {"error": {"message": message, "type": kind, "code": status}})

    def _send(self, status, answer):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    be_refused(*json.loads(sys.stdin.read()))
