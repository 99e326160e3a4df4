"""Measures the first load of a bucket into each target of `dcp_rs.replicate`, and updates.

The first load, from a source that writes as a node does and from one that has its packets in
memory, compared with the target's own bulk load of the same rows from in-memory Arrow data. Updates
rewrite a tenth of the documents in the embedded cluster, compared with the target's own MERGE of as
many rows. Sources and replications are processes of their own: processor seconds and memory are the
replication's.

With `--tables N`, instead: the first load and an update of N tables, each of a collection, compared
with one table of the same documents, in changes per second of processor time.

Usage: benches/replicate/run.py --program PEERS [--documents N] [--runs N] [--postgres URI]
           [--kafka BROKERS] [--no-write] [TARGET ...]
       benches/replicate/run.py --tables N [--documents N] [--runs N] [--postgres URI] [TARGET ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dcp_rs

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import many
from bulk import BULK, MERGES, rows_of
from figures import record
from many import Cost

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = {"as a node writes": "node", "from memory": "recorded"}
_VBUCKETS = 64
NAMES = {
    "duckdb": "DuckDB", "ducklake": "DuckLake", "delta": "Delta", "parquet": "Parquet",
    "iceberg": "Iceberg", "postgres": "PostgreSQL", "kafka": "Kafka",
}  # fmt: skip
PUBLISHED = 1_000_000 / (12 * 0.383)
"""Documents a second of a core that go-dcp-kafka publishes: a million in 12 s with 0.383 cores."""
# What is below its goal is bold.
OF_BULK = 0.6
OF_A_CORE = dict.fromkeys(("delta", "parquet", "kafka"), 2 * PUBLISHED)
UPDATES = {"duckdb": 50_000, "postgres": 20_000}


def main() -> None:
    """Measures, and writes the results."""
    options = _arguments()
    urls = addresses(options.postgres, options.kafka)
    chosen = options.targets or list(urls)
    if options.tables is not None:
        there = {name: _of_many(name, urls[name], options.postgres) for name in chosen}
        with dcp_rs.testing.EmbeddedCluster(password=many.PASSWORD) as cluster:
            many.measure(cluster, options.tables, options.documents, there, options.runs)
        return
    machine = subprocess.run(
        [str(options.program), "machine"], capture_output=True, text=True, check=True
    ).stdout.strip()
    before = os.getloadavg()[0]
    lines = [*_loads(options, urls, chosen), *_updates(options, urls, chosen)]
    head = (
        f"`dcp_rs.replicate` of {options.documents:,} documents of 256 B, in rows a second and in "
        "rows a second of processor time; Kafka's without headers; beside the target's own bulk "
        f"load and MERGE of Arrow data into a table of the same key; medians of {options.runs} "
        f"runs; {machine}; load {before:.1f} before and {os.getloadavg()[0]:.1f} after; Python "
        f"{sys.version.split()[0]}; "
        '`make bench-replicate ARGS="--postgres URI --kafka BROKERS"`.'
    )
    if options.no_write:
        print("\n".join([head, "", *lines]))
    else:
        record("replicate", head, lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help="such as duckdb-table (default: all)"
    )
    parser.add_argument("--program", type=Path, metavar="PEERS", help="the example `peers`")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--tables", type=int, metavar="N", help="compare so many tables with one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--postgres", metavar="URI", help="database to write to")
    parser.add_argument("--kafka", metavar="BROKERS", help="brokers to write to")
    parser.add_argument("--no-write", action="store_true", help="print the tables instead")
    options = parser.parse_args()
    if options.tables is None and options.program is None:
        parser.error("--program is needed")
    return options


def addresses(postgres: str | None, kafka: str | None) -> dict[str, str]:
    """Returns the URL of each target, whose mode its name ends with."""
    found = {
        "duckdb-table": "duckdb://{folder}/replica.duckdb",
        "duckdb-log": "duckdb://{folder}/replica.duckdb",
        "delta-table": "delta://{folder}/replica",
        "delta-log": "delta://{folder}/replica",
        "parquet-log": "parquet://{folder}/replica",
        "iceberg-log": "iceberg://{folder}/replica",
    }
    if find_spec("duckdb_extension_ducklake") is not None:
        for mode in ("table", "log"):
            found[f"ducklake-{mode}"] = "ducklake+sqlite:///{folder}/replica.db"
    if postgres is not None:
        mark = "&" if "?" in postgres else "?"
        for mode in ("table", "log"):
            found[f"postgres-{mode}"] = f"{postgres}{mark}table=bench_{mode}_{{name}}"
    if kafka is not None:
        topic = "bench-{name}"
        found["kafka-table"] = f"kafka://{kafka}?topic={topic}&name={topic}&headers=none"
    return found


def _of_many(name: str, url: str, postgres: str | None) -> str:
    """Returns the URL of a database or folder of tables."""
    return postgres if postgres is not None and name.startswith("postgres") else url


@dataclass
class Loads:
    """First loads of targets, by round.

    Attributes:
        costs: Of each target from each source.
        own: Seconds of the target's own bulk load.
    """

    costs: dict[tuple[str, str], list[Cost]] = field(default_factory=dict)
    own: dict[str, list[float]] = field(default_factory=dict)

    def of_own(self, name: str) -> list[float]:
        """Returns the rate from memory, of the target's own bulk load."""
        pairs = zip(self.own[name], self.costs[name, "from memory"], strict=True)
        return [spent / cost.seconds for spent, cost in pairs]


def first_loads(
    options: argparse.Namespace, urls: dict[str, str], chosen: dict[str, list[str]]
) -> Loads:
    """Loads into targets.

    Args:
        options: Of the command line.
        urls: Where each target is.
        chosen: The targets for each source.
    """
    found = Loads()
    for source, names in chosen.items():
        with _serving(options, SOURCES[source]) as job:
            # The first to read has the source forward what it keeps for the next.
            rows = rows_of(job)
            for run in range(options.runs + 1):
                for name in names:
                    with _place(urls[name]) as (url, folder):
                        target, _, mode = name.partition("-")
                        cost = many.replicated(job, url, mode, {})
                        bulk = BULK.get(target)
                        if bulk is not None and source == "from memory" and run:
                            spent = bulk(rows, mode, folder, options.postgres)
                            found.own.setdefault(name, []).append(spent)
                    if cost.changes != options.documents:
                        sys.exit(f"{cost.changes} changes came instead of {options.documents}")
                    print(f"  {run} {name} {source}: {cost}", file=sys.stderr)
                    if run:
                        found.costs.setdefault((name, source), []).append(cost)
    return found


def _loads(options: argparse.Namespace, urls: dict[str, str], chosen: list[str]) -> list[str]:
    """Returns a table of first loads."""
    found = first_loads(options, urls, dict.fromkeys(SOURCES, chosen))
    lines = [
        "| first load | " + "".join(f"{each} | of a core | " for each in SOURCES) + "peak MiB "
        "| its own bulk load | of that |",
        "|---" * (2 * len(SOURCES) + 4) + "|",
    ]
    for name in chosen:
        target, _, mode = name.partition("-")
        cells = [f"{NAMES[target]}, {mode}"]
        for source in SOURCES:
            costs = found.costs[name, source]
            cells += [_rate(options.documents, [each.seconds for each in costs])]
            own_core = [each.processor for each in costs]
            cells += [_rate(options.documents, own_core, OF_A_CORE.get(target, 0))]
        last = found.costs[name, "from memory"]
        cells += [f"{statistics.median(each.peak for each in last):.0f}"]
        if name in found.own:
            ratio = statistics.median(found.of_own(name))
            cells += [_rate(options.documents, found.own[name]), _share(ratio, OF_BULK)]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def updates(
    options: argparse.Namespace, urls: dict[str, str], names: list[str]
) -> dict[str, list[tuple[Cost, float]]]:
    """Updates a tenth of a table; returns what it took, and the seconds of the target's MERGE."""
    found: dict[str, list[tuple[Cost, float]]] = {name: [] for name in names}
    count = options.documents // 10
    chance = random.Random(1)  # noqa: S311 - keys to rewrite, not secrets
    with dcp_rs.testing.EmbeddedCluster(
        vbuckets=_VBUCKETS,
        password=many.PASSWORD,
        limits=dcp_rs.testing.Limits(memory_quota=1 << 40),
    ) as cluster:
        _write(cluster, range(options.documents))
        job = {
            "connection_string": cluster.connection_string, "bucket": cluster.bucket_name,
            "username": "Administrator", "password": many.PASSWORD,
        }  # fmt: skip
        rows = rows_of(job)
        for name in names:
            with _place(urls[name]) as (url, folder):
                merge = MERGES[name.split("-")[0]](rows, folder, options.postgres)
                many.replicated(job, url, "table", {})
                for run in range(options.runs + 1):
                    _write(cluster, chance.sample(range(options.documents), count))
                    cost = many.replicated(job, url, "table", {})
                    part = rows.take(sorted(chance.sample(range(options.documents), count)))
                    spent = merge(part)
                    print(f"  {run} {name} updates: {cost}, MERGE {spent:.2f} s", file=sys.stderr)
                    if cost.changes != count:
                        sys.exit(f"{cost.changes} changes came instead of {count}")
                    if run:
                        found[name].append((cost, spent))
    return found


def _updates(options: argparse.Namespace, urls: dict[str, str], chosen: list[str]) -> list[str]:
    """Returns a table of updates."""
    lines = [
        "| updates of a tenth | a second | of a core | peak MiB | its own MERGE | of that |",
        "|---|---|---|---|---|---|",
    ]
    count = options.documents // 10
    names = [name for name in chosen if name.endswith("-table") and name.split("-")[0] in MERGES]
    for name, rounds in updates(options, urls, names).items():
        costs, own = zip(*rounds, strict=True)
        target = name.split("-")[0]
        ratio = statistics.median(spent / each.seconds for each, spent in rounds)
        seconds = [each.seconds for each in costs]
        lines.append(
            f"| {NAMES[target]} | {_rate(count, seconds, UPDATES.get(target, 0))} | "
            f"{_rate(count, [each.processor for each in costs])} | "
            f"{statistics.median(each.peak for each in costs):.0f} | {_rate(count, list(own))} | "
            f"{_share(ratio)} |"
        )
    return lines


def _rate(count: int, seconds: list[float], goal: float = 0) -> str:
    rate = count / statistics.median(seconds)
    return _bold(f"{float(f'{rate:.3g}'):,.0f}", is_missed=rate < goal)


def _share(ratio: float, goal: float = 0) -> str:
    return _bold(f"{ratio:.0%}".replace("%", " %"), is_missed=ratio < goal)


def _bold(text: str, *, is_missed: bool) -> str:
    return f"**{text}**" if is_missed else text


@contextmanager
def _serving(options: argparse.Namespace, source: str) -> Iterator[dict[str, Any]]:
    """Runs a source; returns how to read from it."""
    command = [str(options.program), source, str(options.documents), "256", str(_VBUCKETS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        text = process.stdout.readline() if process.stdout else ""
        if not text:
            sys.exit(f"the source failed with {process.wait()}")
        try:
            yield json.loads(text)
        finally:
            process.communicate()


@contextmanager
def _place(url: str) -> Iterator[tuple[str, Path]]:
    """Returns a URL of its own, and a folder beside."""
    folder = Path(tempfile.mkdtemp(prefix="dcp_rs-bench-"))
    try:
        yield url.format(folder=folder, name=folder.name.rpartition("-")[2].lower()), folder
    finally:
        shutil.rmtree(folder)


def _write(cluster: dcp_rs.testing.EmbeddedCluster, numbers: Any) -> None:
    """Writes documents of 256 B."""
    chance = random.Random(1)  # noqa: S311 - values to write, not secrets
    texts = [f"{chance.getrandbits(460):0115x}" * 2 for _ in range(256)]
    for n in numbers:
        document = json.dumps({"n": n, "text": texts[n % 256]}, separators=(",", ":"))
        cluster.upsert(f"key_{n:09}", document[:-2] + "x" * (256 - len(document)) + '"}')
    cluster.persist()


if __name__ == "__main__":
    main()
