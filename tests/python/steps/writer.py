"""Replicates in forked children, each of which may be killed at a step of its commits.

Reads requests from standard input and answers on standard output, a JSON document a line. Forks
before anything is opened: what takes long, the imports, is done once.
"""

import ctypes
import json
import os
import sys
import traceback
import warnings

# What targets import, none of which starts a thread by being imported.
import adbc_driver_postgresql.dbapi  # noqa: F401
import confluent_kafka.admin  # noqa: F401
import deltalake  # noqa: F401
import duckdb  # noqa: F401
import obstore  # noqa: F401
import pyarrow.compute
import pyarrow.parquet  # noqa: F401
import pyiceberg.catalog.sql  # noqa: F401

import dcp_rs
from dcp_rs.replication import open_database, open_target

_STEPS = ctypes.CDLL(None)
_STEPS.dcp_steps_seen.restype = ctypes.c_long


class Counted:
    """A target or a database whose steps are counted while it opens and commits."""

    def __init__(self, inner, kill_at):
        self._inner, self._kill_at = inner, kill_at
        self.close = inner.close
        for name in ("modes", "takes_rejects", "columns", "marks_deletes", "compacts"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        if hasattr(inner, "widens"):
            self.stored, self.widens = inner.stored, inner.widens
        for name in ("fold", "newest"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def _counting(self, work, *arguments):
        _STEPS.dcp_steps_arm(ctypes.c_long(self._kill_at))
        try:
            return work(*arguments)
        finally:
            _STEPS.dcp_steps_disarm()

    def open(self, *arguments):
        return self._counting(self._inner.open, *arguments)

    def commit(self, given):
        if isinstance(given, list):
            given = [(target._inner, commit) for target, commit in given]
        return self._counting(self._inner.commit, given)

    def maintain(self, keep):
        return self._counting(self._inner.maintain, keep)

    def drop(self, target):
        return self._counting(self._inner.drop, target._inner)

    def target(self, table):
        return Counted(self._inner.target(table), self._kill_at)


def replicate(request):
    opening = open_database if "tables" in request["options"] else open_target
    _STEPS.dcp_steps_port(request["port"])
    target = opening(request["url"], request.get("storage_options"))
    target = Counted(target, request["kill_at"])
    with dcp_rs.connect(
        request["connection"], bucket="default", username="Administrator", password="canary-8f1c2e"
    ) as client:
        done = dcp_rs.replicate(client, target, once=True, **request["options"])
    generations = {name: table.generation for name, table in done.tables.items()}
    return {"generation": done.generation, "generations": generations, "rejected": done.rejected}


def run(request):
    """Runs a request in a child; says how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = replicate(request)
        except BaseException:  # noqa: BLE001 - told to the parent
            answer = {"error": traceback.format_exc()}
        answer["steps"] = _STEPS.dcp_steps_seen()
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read()
    _, status = os.waitpid(child, 0)
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0} | json.loads(
        told or "{}"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()
