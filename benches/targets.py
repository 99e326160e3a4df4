"""Measures every target of docs/performance.json in one run, and writes whether it is met.

`make bench-targets` builds what it needs and runs this, with a PostgreSQL server and a Kafka broker
of its own, in 40 minutes. The cases of a target alternate: once to warm up, then for nine
rounds. A figure is the median of the rounds with the smallest and the largest; the median decides.
Nothing is written if anything fails, or of a part of the groups.

Usage: benches/targets.py --program PEERS [--rounds N] [--only GROUP ...] [--no-write]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

from figures import record

from kafka_broker import Broker
from postgres_server import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


ROOT = Path(__file__).resolve().parents[1]


def _program(name: str) -> ModuleType:
    """Loads the `run.py` of a folder."""
    folder = Path(__file__).parent / name
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"{name}_run", folder / "run.py")
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks for its module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


peers, reading, replicate = (_program(name) for name in ("peers", "reading", "replicate"))

RUST, PYTHON, JAVA, GOCB, GODCP = (
    *("dcp_rs (Rust)", "dcp_rs (Python)"),
    *("java-dcp-client", "gocbcore", "go-dcp"),
)


def _share(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _times(value: float) -> str:
    return f"{value:.{0 if value >= 10 else 1 if value >= 3 else 2}f} times"


def _micros(value: float) -> str:
    return f"{value * 1e6:.0f} µs"


def _rate(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}"


@dataclass
class Case:
    """What a target asks of one case, and what its rounds were."""

    name: str
    goal: float
    rounds: list[float]


@dataclass
class Target:
    """A target, of one or more cases."""

    what: str
    cases: list[Case]
    shown: Callable[[float], str]
    is_most: bool = False

    def row(self) -> str:
        """Returns a row of the table: what, the target, what was measured."""
        sign = "at most" if self.is_most else "at least"
        goals = list(dict.fromkeys(self.shown(case.goal) for case in self.cases))
        told = [self._told(case) for case in self.cases]
        return f"| {self.what} | {sign} {', '.join(goals)} | {'; '.join(told)} |"

    def _told(self, case: Case) -> str:
        middle = statistics.median(case.rounds)
        is_missed = middle > case.goal if self.is_most else middle < case.goal
        text = f"**{self.shown(middle)}**" if is_missed else self.shown(middle)
        low, high = (self.shown(end(case.rounds)) for end in (min, max))
        spread = "" if len(case.rounds) == 1 else f" ({low.split(' ')[0]} to {high})"
        return f"{text}{spread}{f' {case.name}' if case.name else ''}"


@dataclass
class Run:
    """What is asked for."""

    program: Path
    rounds: int
    folder: Path
    kafka: str = ""
    postgres: str = ""
    cores: tuple[int | None, int | None] = field(default_factory=reading.cores)


Samples = dict[str, list[Any]]


def _clients(
    run: Run, source: str, value_len: int, names: tuple[str, ...], *, changes: int = 1_000_000
) -> Samples:
    """Has clients read from a source of `peers` in turns; returns their samples by round."""
    known = [*peers.peers(run.program), *peers.drains(run.program)]
    chosen = [peer for peer in known if peer.name in names]
    command = [str(run.program), source, str(changes), str(value_len), str(peers.VBUCKETS)]
    served = peers.Source.begin(command, run.cores[0])
    samples: Samples = peers.measure(
        peers.job_of(served.job, changes), chosen, run.rounds, run.cores[1]
    )
    told = served.end()
    if source != "source":
        peers.check_relayed(json.loads(told), len(chosen), run.rounds)
    return samples


def _ratios(samples: Samples, one: str, of: str, part: str) -> list[float]:
    """Returns a figure of one client, of another's, in each round."""
    pairs = zip(samples[one], samples[of], strict=True)
    return [getattr(own, part) / getattr(other, part) for own, other in pairs]


def as_a_node_writes(run: Run) -> Iterator[Target]:
    """Beside a drain and other clients, at both priorities."""
    drain = peers.NAPPING
    names = (RUST, PYTHON, JAVA, GOCB, GODCP, drain)
    medium = _clients(run, "node", 256, names)
    high = _clients(run, "node-high", 256, (RUST, PYTHON, drain))
    by_priority = {"at medium priority": medium, "at high": high}
    for client, goal in ((RUST, 1.1), (PYTHON, 1.25)):
        for part, most in (("cpu", goal), ("seconds", 1.02)):
            time = "processor" if part == "cpu" else "elapsed"
            yield Target(
                f"as a node writes, 256 B: {time} time of {client[8:-1]}, of a napping drain's",
                [
                    Case(name, most, _ratios(samples, client, drain, part))
                    for name, samples in by_priority.items()
                ],
                _times,
                is_most=True,
            )
    for other, goal in ((GOCB, 6), (JAVA, 10), (GODCP, 10)):
        yield Target(
            f"the same: processor time of {other}, of Python's",
            [Case("", goal, _ratios(medium, other, PYTHON, "cpu"))],
            _times,
        )
    yield Target(
        "the same: elapsed time of gocbcore, of Python's",
        [Case("", 1.1, _ratios(medium, GOCB, PYTHON, "seconds"))],
        _times,
    )


def from_memory(run: Run) -> Iterator[Target]:
    """Beside other clients, as fast as they read."""
    names = (RUST, JAVA, GOCB, GODCP)
    sizes = {"256 B": 256, "1 KiB": 1024, "4 KiB": 4096}
    by_size = {
        name: _clients(run, "recorded", size, names, changes=500_000)
        for name, size in sizes.items()
    }
    for other, goal in ((JAVA, 5), (GOCB, 5), (GODCP, 8)):
        yield Target(
            f"changes/s of Rust, from memory, of {other}",
            [
                Case(f"at {size}", goal, _ratios(samples, other, RUST, "seconds"))
                for size, samples in by_size.items()
            ],
            _times,
        )


def from_the_embedded_cluster(run: Run) -> Iterator[Target]:
    """Beside other clients, of a source that is slower than dcp_rs."""
    names = (RUST, JAVA, GOCB, GODCP)
    by_size = {
        name: _clients(run, "source", size, names, changes=500_000)
        for name, size in {"256 B": 256, "4 KiB": 4096}.items()
    }
    small = by_size["256 B"]
    yield Target(
        "changes/s of Rust, from the embedded cluster, 256 B",
        [
            Case(f"of {other}", goal, _ratios(small, other, RUST, "seconds"))
            for other, goal in ((JAVA, 5), (GOCB, 5), (GODCP, 8))
        ],
        _times,
    )
    for other in (JAVA, GOCB, GODCP):
        yield Target(
            f"processor time of {other}, from the embedded cluster, of Rust's",
            [
                Case(f"at {size}", 5, _ratios(samples, other, RUST, "cpu"))
                for size, samples in by_size.items()
            ],
            _times,
        )
    yield Target(
        "peak memory of others, from the embedded cluster, of Rust's",
        [
            Case(f"of {other}", goal, _ratios(small, other, RUST, "peak"))
            for other, goal in ((JAVA, 4), (GOCB, 1))
        ],
        _times,
    )


def _cases(run: Run, cases: list[Any]) -> list[list[Any]]:
    """Reads the cases of `reading` in turns; returns their figures by round."""
    found = reading.compare(cases, run.rounds)
    return [found[case.name] for case in cases]


def on_many_nodes(run: Run) -> Iterator[Target]:
    """The same vBuckets on 16 nodes and on one."""
    documents = 1_000_000
    one, many = _cases(
        run,
        [
            reading.Case(
                f"{nodes} nodes",
                {"documents": documents},
                program=[str(run.program), "node", str(documents), "256", "1024", str(nodes)],
            )
            for nodes in (1, 16)
        ],
    )
    what = "16 nodes that write as nodes do, of one with as many vBuckets"
    rounds = list(zip(one, many, strict=True))
    yield Target(
        f"{what}: rows/s", [Case("", 0.9, [a.seconds / b.seconds for a, b in rounds])], _share
    )
    yield Target(
        f"{what}: processor time",
        [Case("", 1.15, [b.cpu / a.cpu for a, b in rounds])],
        _share,
        is_most=True,
    )


def in_python(run: Run) -> Iterator[Target]:
    """Batches, rows, latency and TLS."""
    yield Target(
        "batches in Python, of Rust",
        [
            Case(
                f"at {size}",
                0.95,
                [
                    rust.seconds / python.seconds
                    for rust, python in reading.with_rust(run.program, 512, length, run.rounds)
                ],
            )
            for size, length in (("256 B", 256), ("1 KiB", 1024))
        ],
        _share,
    )
    rows = reading.seconds_per_row(500_000, run.rounds)
    tuples = [1 / each["tuples"] for each in rows]
    yield Target("tuples a second in Python, 256 B", [Case("", 2e6, tuples)], _rate)
    sender = reading.often(run.program, 5000)
    prompt, lingering = reading.on_the_wire(sender, (0, 0.1), run.rounds)
    for name, ways, goals in (
        ("with a `linger` of 0", prompt, (100e-6, 250e-6)),
        ("with the default `linger`", lingering, (1e-3, 5e-3)),
    ):
        for part, goal in zip(("p50", "p99"), goals, strict=True):
            yield Target(
                f"latency from the wire to Python {name}, {part}",
                [Case("", goal, [each[part] for each in ways])],
                _micros,
                is_most=True,
            )
    plain, tls = _cases(run, [reading.Case("plain"), reading.Case("TLS", {"tls": True})])
    rates = [a.seconds / b.seconds for a, b in zip(plain, tls, strict=True)]
    yield Target(
        "rows/s with TLS, of plain, from the embedded cluster", [Case("", 0.5, rates)], _share
    )


def of_large_documents(run: Run) -> Iterator[Target]:
    """Documents of the largest size."""
    total = 256 << 20
    small, large = _cases(
        run,
        [
            reading.Case(f"{size} B", {"documents": total // size, "value_len": size})
            for size in (256 << 10, 20 << 20)
        ],
    )
    # 12 documents of 20 MiB have 6 % less.
    scale = total / (total // (20 << 20) * (20 << 20))
    ratios = [b.seconds * scale / a.seconds for a, b in zip(small, large, strict=True)]
    yield Target(
        "a KiB of documents of 20 MiB, of 256 KiB, from the embedded cluster: time",
        [Case("", 1, ratios)],
        _times,
        is_most=True,
    )


def _bench(name: str, *options: str) -> list[dict[str, Any]]:
    """Runs a benchmark in Rust; returns its cases."""
    command = ["cargo", "bench", "-p", "dcp-benches", "--locked", "--quiet", "--bench", name]
    done = subprocess.run(
        [*command, "--", "--json", *options],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _by_round(cases: list[dict[str, Any]], group: str, case: str, of: str) -> list[float]:
    """Returns the speed of a case, of a reference's, in each round."""
    (own,) = (each for each in cases if (each["group"], each["case"]) == (group, case))
    found: list[float] = own["speed_ratios_by_round"][of]
    return found


def in_rust(run: Run) -> Iterator[Target]:
    """Benchmarks in Rust, of a reference measured with them."""
    rounds = ("--rounds", str(max(run.rounds, 5)))
    cases = _bench("memory", *rounds)
    sizes = {"64 B": 64, "256 B": 256, "1 KiB": 1024, "4 KiB": 4096}
    built, loop = "connection machine to RecordBatch", "hand-written loop"
    yield Target(
        "bytes in memory to record batches, of a hand-written loop",
        [
            Case(
                f"at {name}",
                0.55 if length == 4096 else 0.7,
                _by_round(cases, f"memory to columns, {length} B values", built, loop),
            )
            for name, length in sizes.items()
        ],
        _share,
    )
    yield Target(
        "decompressing Snappy values, of `snap` alone",
        [
            Case(
                f"at {name}",
                0.75,
                _by_round(cases, f"snappy, {length} B values", "sink to RecordBatch", "snap alone"),
            )
            for name, length in sizes.items()
            if length > 64
        ],
        _share,
    )
    yield Target(
        "JSON to columns, of arrow-json's speed",
        [
            Case(
                f"{case.removeprefix('document_schema, ')}, {fields} fields",
                0.8,
                _by_round(cases, f"documents of {fields} fields", case, "arrow-json"),
            )
            for fields in (10, 50)
            for case in ("document_schema", "document_schema, Snappy", "VARIANT")
        ],
        _share,
    )
    short = ("--short", *rounds)
    cases = _bench("loopback", *short, "--only", "reno")
    yield Target(
        "loopback to record batches, of a plain drain",
        [
            Case(f"at {name}", 0.9, _by_round(cases, each["group"], each["case"], "plain drain"))
            for each in cases
            if each["speed_ratio_to"]
            for name in sizes
            if f" {sizes[name]} B values" in each["group"]
        ],
        _share,
    )
    cases = _bench("producer", *short, "--only", "memory, reno")
    own = ("producer from memory, reno, 1024 B values", "embedded producer", "frames in memory")
    yield Target(
        "embedded cluster to a plain reader, of ready frames in memory, 1 KiB",
        [Case("", 0.8, _by_round(cases, *own))],
        _share,
    )
    names = {length: name for name, length in sizes.items()}
    yield Target(
        "heap allocations a change",
        [
            Case(f"at {names[each['value_len']]}", 0.01, [each["allocations_per_change"]])
            for each in _bench("hotpath")
        ],
        "{:.3f}".format,
        is_most=True,
    )


def in_spark(run: Run) -> Iterator[Target]:
    """Beside sources that already have their batches."""
    seconds = reading.beside_cached(run.program, 1_000_000, run.rounds)
    yield Target(
        "Spark, of cached batches while the cluster sends to a drain",
        [Case(f"`{name}`", 0.8, [a / own for a, _, own in each]) for name, each in seconds.items()],
        _share,
    )
    shapes = (*reading.SHAPES, reading.AGAIN)
    yield Target(
        "micro-batch of a few rows, of a cached source's",
        [
            Case(
                f"with {shape}",
                1.15,
                reading.ratios_to_cached(shape.measure(max(3, run.rounds // 3))),
            )
            for shape in shapes
        ],
        _share,
        is_most=True,
    )


def into_targets(run: Run) -> Iterator[Target]:
    """First loads and updates."""
    urls = replicate.addresses(run.postgres, run.kafka)
    options = argparse.Namespace(
        program=run.program, documents=1_000_000, runs=run.rounds, postgres=run.postgres
    )
    of_bulk = [name for name in urls if not name.startswith("kafka")]
    of_core = ["delta-table", "parquet-log", "kafka-table"]
    loads = replicate.first_loads(
        options, urls, {"as a node writes": of_core, "from memory": of_bulk}
    )

    def named(name: str) -> str:
        target, _, mode = name.partition("-")
        return f"{replicate.NAMES[target]} ({mode})"

    yield Target(
        "first load as a node writes: rows a second of a core, of go-dcp-kafka's published "
        f"{_rate(replicate.PUBLISHED)} into Kafka",
        [
            Case(
                f"into {named(name)}",
                2,
                [
                    options.documents / each.processor / replicate.PUBLISHED
                    for each in loads.costs[name, "as a node writes"]
                ],
            )
            for name in of_core
        ],
        _times,
    )
    yield Target(
        "first load from memory, of the target's own bulk load",
        [Case(f"into {named(name)}", replicate.OF_BULK, loads.of_own(name)) for name in of_bulk],
        _share,
    )
    names = [f"{target}-table" for target in replicate.UPDATES]
    count = options.documents // 10
    for name, rounds in replicate.updates(options, urls, names).items():
        target = name.split("-")[0]
        yield Target(
            f"updates a second of a table of a million documents, {replicate.NAMES[target]}",
            [Case("", replicate.UPDATES[target], [count / cost.seconds for cost, _ in rounds])],
            _rate,
        )


GROUPS = (
    as_a_node_writes,
    from_memory,
    from_the_embedded_cluster,
    on_many_nodes,
    in_python,
    of_large_documents,
    in_rust,
    in_spark,
    into_targets,
)


class _Durable(PostgresServer):
    """One that writes as it does by default."""

    def start(self) -> None:
        settings = f"-k {self.folder} -c listen_addresses=''"
        self._run("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", settings)


@contextmanager
def _servers(run: Run) -> Iterator[None]:
    """Starts a broker and a database for a run."""
    server = _Durable()
    try:
        broker = Broker(run.folder)
        try:
            run.kafka, run.postgres = broker.address, f"postgresql:///postgres?{server.options}"
            yield
        finally:
            broker.close()
    finally:
        server.stop()


def main() -> None:
    """Measures, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=Path, required=True, help="path of the example `peers`")
    parser.add_argument("--rounds", type=int, default=9)
    names = [group.__name__ for group in GROUPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="GROUP")
    parser.add_argument("--no-write", action="store_true", help="print the table instead")
    chosen = parser.parse_args()
    machine = peers.first_line(str(chosen.program), "machine")
    before = os.getloadavg()[0]
    rows = []
    peers.LOG.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(chosen.program.resolve(), chosen.rounds, Path(folder))
        with _servers(run):
            for group in GROUPS:
                if group.__name__ in chosen.only:
                    found = [target.row() for target in group(run)]
                    print("\n".join(found), file=sys.stderr, flush=True)
                    rows += found
    about = (
        f"One run; medians of {run.rounds} rounds (micro-batches: {max(3, run.rounds // 3)}), with "
        "the smallest and the largest; in bold: what misses its target. `make bench-targets`. "
        f"{machine}; load {before:.1f} before; {peers.versions()}."
    )
    lines = ["| what | target | measured |", "|---|---|---|", *rows]
    # A part would take the place of the whole.
    if chosen.no_write or set(chosen.only) != set(names):
        print("\n".join([about, "", *lines]))
    else:
        record("targets", about, lines)


if __name__ == "__main__":
    main()
