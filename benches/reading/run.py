"""Measures the reader in Python: throughput of a connection, scaling, rows, latency.

`make bench-reading` runs this and writes docs/performance.json and its plots, each group in its own
place, so that `ARGS="--only growth"` measures and writes only that one. Cluster and reader are
separate processes, each pinned to a core if there are two. The cases of a group alternate: once to
warm up, then for the requested number of rounds; a ratio is the median of the ratios by round.
Nothing of a group is written if anything fails or a change is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figures import DOCUMENT, record
from growth_plot import Panel, Point, plot

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
PLOTS = {group: DOCUMENT.with_name(f"{group}.svg") for group in ("growth", "long")}
PYTHON = [sys.executable, "-W", "ignore"]
READER = [*PYTHON, str(HERE / "reader.py")]
BASE = {
    "documents": 1_000_000,
    "value_len": 256,
    "vbuckets": 64,
    "nodes": 1,
    "tls": False,
    # None but the default one.
    "collections": 0,
    "xattrs": False,
    "words": False,
}

COMPRESSED = {"compressed": True}

_SIZES = (256, 64, 1 << 10, 16 << 10, 256 << 10, 20 << 20)
_BYTES_OF_A_SIZE = 256 << 20
_OF_SIZES = "size in bytes, time a KiB"


@dataclass
class Case:
    """A name, the contents of the producer, and the reader's job."""

    name: str
    source: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    # A program to use as the source instead of `source.py`; `source` still describes its contents.
    program: list[str] | None = None


@dataclass
class Figures:
    """Measurements of one run."""

    seconds: float
    cpu: float
    peak: float
    measured: dict[str, Any]


def cores() -> tuple[int | None, int | None]:
    """Returns a core for the producer and one for the reader, if there are two."""
    mine = sorted(os.sched_getaffinity(0))
    return (mine[0], mine[1]) if len(mine) > 1 else (None, None)


def start(command: list[str], core: int | None) -> subprocess.Popen[str]:
    """Starts a program on a core; a new process inherits the core of its parent."""
    mine = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    finally:
        os.sched_setaffinity(0, mine)


@contextmanager
def serving(
    command: list[str], wanted: dict[str, Any] | None, *, is_pinned: bool = True
) -> Iterator[dict[str, Any]]:
    """Runs a producer; returns the job for its readers."""
    process = start(command, cores()[0] if is_pinned else None)
    if wanted is not None:
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
    text = process.stdout.readline()
    if not text:
        sys.exit(f"the producer failed with {process.wait()}")
    yield json.loads(text)
    process.communicate()


def read(
    command: list[str], job: dict[str, Any], expected: int | None, *, is_pinned: bool = True
) -> Figures:
    """Runs a reader's job once."""
    process = start(command, cores()[1] if is_pinned else None)
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    text = process.stdout.readline()
    if not text:
        sys.exit(f"the reader failed with {process.wait()}")
    measured = json.loads(text)
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    process.stdin.close()
    process.stdout.close()
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    if expected is not None and measured["changes"] != expected:
        sys.exit(f"{measured['changes']} changes came instead of {expected}")
    cpu = used.ru_utime + used.ru_stime
    return Figures(measured["seconds"], cpu, int(peak.split()[1]) / 1024, measured)


def compare(cases: list[Case], rounds: int) -> dict[str, list[Figures]]:
    """Runs the cases in alternation."""
    figures: dict[str, list[Figures]] = {case.name: [] for case in cases}
    with ExitStack() as stack:
        jobs = []
        held: dict[str, dict[str, Any]] = {}
        for case in cases:
            wanted = {**BASE, **case.source}
            key = json.dumps([wanted, case.program])
            if key not in held:
                command = case.program or [*PYTHON, str(HERE / "source.py")]
                told = None if case.program else wanted
                held[key] = stack.enter_context(serving(command, told))
            jobs.append({"work": "batches", **held[key], **case.job})
        for round_number in range(rounds + 1):
            for case, job in zip(cases, jobs, strict=True):
                expected = {**BASE, **case.source}["documents"]
                sample = read(READER, job, expected)
                if round_number:
                    figures[case.name].append(sample)
                print(f"  {round_number} {case.name}: {sample.seconds:.3f} s", file=sys.stderr)
    return figures


@dataclass
class Summary:
    """Returns the medians of a case's rounds."""

    name: str
    documents: int
    seconds: float
    # Rows per second relative to the first case of the group.
    ratio: float
    cpu: float
    peak: float


def summarize(cases: list[Case], rounds: int) -> list[Summary]:
    """Measures a group; each case is compared with the first."""
    figures = compare(cases, rounds)
    first = figures[cases[0].name]
    reference = {**BASE, **cases[0].source}["documents"]
    found = []
    for case in cases:
        samples = figures[case.name]
        documents = {**BASE, **case.source}["documents"]
        ratios = [
            (other.seconds / reference) / (own.seconds / documents)
            for own, other in zip(samples, first, strict=True)
        ]
        found.append(
            Summary(
                name=case.name,
                documents=documents,
                seconds=statistics.median(sample.seconds for sample in samples),
                ratio=statistics.median(ratios),
                cpu=statistics.median(sample.cpu for sample in samples),
                peak=statistics.median(sample.peak for sample in samples),
            )
        )
    return found


def table(title: str, summaries: list[Summary]) -> list[str]:
    """Formats a group as a table."""
    lines = [
        f"| {each.name} | {each.documents / each.seconds / 1e6:.2f} M | {each.ratio:.0%} "
        f"| {each.cpu / each.documents * 1e6:.2f} | {each.peak:.0f} |"
        for each in summaries
    ]
    head = f"| {title} | rows/s | of the first | CPU µs/row | peak MiB |"
    return [head, "|---|---|---|---|---|", *lines, ""]


def carried(documents: int, rounds: int) -> list[str]:
    """Throughput of the connection by its settings."""
    source = {"documents": documents}
    names = {"collections": ["measured.c000"]}
    nodes = [Case(f"{n} nodes", {**source, "nodes": n}) for n in (2, 4)]
    windows = [
        Case(f"flow-control buffer {size >> 10} KiB", source, {"connection": {"buffer_size": size}})
        for size in (256 << 10, 1 << 20, 32 << 20)
    ]
    xattrs = {**source, "xattrs": True}
    words = {**source, "words": True, "value_len": 1024, "documents": documents // 4}
    cases = [
        Case("1 node, flow-control buffer 8 MiB", source),
        Case("TLS", {**source, "tls": True}),
        Case("xattrs sent and taken", xattrs, {"options": {"include": "xattrs"}}),
        Case("one collection", {**source, "collections": 1}, {"options": names}),
        *windows,
        *nodes,
    ]
    lines = table(f"{documents:,} changes of 256 B", summarize(cases, rounds))
    cases = [
        Case("as it is", words),
        Case(
            "compressed for the connection (`compressed=True`)", words, {"connection": COMPRESSED}
        ),
    ]
    of_words = f"{words['documents']:,} changes of 1 KiB of random words"
    return lines + table(of_words, summarize(cases, rounds))


def growth(largest: int, rounds: int) -> tuple[list[str], str]:
    """Whether time and memory per change stay constant: tables, and a plot."""
    steps = [n for n in (1_000_000, 10_000, 100_000, 10_000_000) if n <= largest]
    base = {"documents": min(largest, 300_000)}
    of_base = f"{base['documents']:,} documents of 256 B"
    sizes = {n: max(1, min(base["documents"], _BYTES_OF_A_SIZE // n)) for n in _SIZES}
    groups = {
        "documents": {n: Case(f"{n:,}", {"documents": n}) for n in steps},
        "vBuckets": {
            n: Case(f"{n} vBuckets", {**base, "vbuckets": n}) for n in (64, 1, 16, 256, 1024)
        },
        "nodes": {n: Case(f"{n} nodes", {**base, "nodes": n}) for n in (1, 4, 16, 64)},
        "collections": {
            n: Case(f"{n} collections", {**base, "collections": n}) for n in (1, 10, 100, 1000)
        },
        _OF_SIZES: {
            n: Case(f"{count:,} of {n:,} B", {"documents": count, "value_len": n})
            for n, count in sizes.items()
        },
    }
    titles = {"documents": "documents of 256 B", _OF_SIZES: "documents"}
    lines, panels = [], []
    for what, cases in groups.items():
        summaries = summarize(list(cases.values()), rounds)
        lines += table(titles.get(what, of_base), summaries)
        points = [
            Point(size, each.seconds / each.documents * 1e9 / _work(what, size), each.peak)
            for size, each in zip(cases, summaries, strict=True)
        ]
        panels.append(Panel(what, sorted(points)))
    return lines, plot(panels)


def _work(what: str, size: int) -> float:
    """Returns the work of a document: its KiB, if these grow."""
    return size / 1024 if what == _OF_SIZES else 1


def nodes(program: Path, documents: int, rounds: int) -> list[str]:
    """The same work on more nodes and vBuckets, with each node's write pattern."""
    cases = []
    for count, vbuckets in ((1, 64), (1, 1024), (4, 1024), (16, 1024)):
        command = [str(program), "node", str(documents), "256", str(vbuckets), str(count)]
        name = f"{count} node{'s' * (count > 1)}, {vbuckets} vBuckets"
        cases.append(Case(name, {"documents": documents}, program=command))
    return table(f"{documents:,} changes of 256 B", summarize(cases, rounds))


def long(program: Path, changes: int) -> tuple[list[str], str]:
    """Whether rate and memory stay constant from the first to the last change: a table, a plot."""
    head = (
        "| changes of 256 B | rows/s, first tenth | last tenth | slowest | CPU µs/row "
        "| MiB after the first tenth | at the end |"
    )
    lines, panels = [head, "|---|---|---|---|---|---|---|"], []
    # 10 times as many with large writes, which take less time.
    for name, of_source, wanted in (
        ("as a node writes", "steady", changes),
        ("in large writes", "ready", 10 * changes),
    ):
        passes = max(1, wanted // ROWS_A_PASS)
        sender = [str(program), of_source, str(passes), "256", "64"]
        with serving(sender, None) as job:
            command = READER
            sample = read(command, {**job, "work": "long"}, job["documents"])
        parts = sample.measured["parts"]
        begins = [{"changes": 0, "seconds": 0}, *parts]
        rates = [
            (now["changes"] - before["changes"]) / (now["seconds"] - before["seconds"])
            for before, now in zip(begins, parts, strict=False)
        ]
        count = sample.measured["changes"]
        lines.append(
            f"| {count / 1e6:,.0f} M {name} | {rates[0] / 1e6:.2f} M | {rates[-1] / 1e6:.2f} M "
            f"| {min(rates) / 1e6:.2f} M | {sample.cpu / count * 1e6:.2f} "
            f"| {parts[0]['resident']:.0f} | {parts[-1]['resident']:.0f} |"
        )
        # Fewer towards the end, where they are close together on the plot.
        points = [
            Point(round(parts[at]["changes"] / 1e6, 1), 1e9 / rates[at], parts[at]["resident"])
            for at in (0, 1, 2, 4, 6, 9)
        ]
        panels.append(Panel(f"million changes {name}", points))
    return lines, plot(panels)


def rows(documents: int, rounds: int) -> list[str]:
    """Rows of in-memory batches."""
    samples = seconds_per_row(documents, rounds)
    lines = ["| rows of 256 B from batches in memory | ns/row | rows/s |", "|---|---|---|"]
    for name in samples[0]:
        of_row = statistics.median(each[name] for each in samples)
        lines.append(f"| {name} | {of_row * 1e9:.0f} | {1 / of_row / 1e6:.2f} M |")
    return [*lines, ""]


def seconds_per_row(documents: int, rounds: int) -> list[dict[str, float]]:
    """Makes rows of batches, by each method; returns the seconds of one in each round."""
    with serving([*PYTHON, str(HERE / "source.py")], {**BASE, "documents": documents}) as job:
        samples = [read(READER, {**job, "work": "rows"}, documents) for _ in range(rounds)]
    return [sample.measured["seconds_per_row"] for sample in samples]


def on_the_wire(
    sender: list[str], lingers: tuple[float, ...], rounds: int
) -> list[list[dict[str, float]]]:
    """From the socket to a batch in Python, in seconds by percentile, with each `linger`."""
    ways: list[list[dict[str, float]]] = [[] for _ in lingers]
    for _ in range(rounds):
        # Not pinned: the threads of a reader must not share a core.
        with serving(sender, None, is_pinned=False) as job:
            for linger, samples in zip(lingers, ways, strict=True):
                wire = {**job, "work": "wire", "linger": linger}
                sample = read(READER, wire, job["documents"], is_pinned=False)
                samples.append(sample.measured["latency"])
    return ways


def often(program: Path, writes: int) -> list[str]:
    """Returns a sender of a change every 0.5 ms."""
    return [str(program), "paced", str(writes // 16), "500", "16"]


def latency(program: Path, writes: int, rounds: int) -> list[str]:
    """From the socket to a batch in Python, and from a write through the producer to a batch."""
    # Changes are few, so p99 and p99.9 are the slowest.
    seldom = [str(program), "paced", "10", "1000000", "1"]
    sent, lingering = on_the_wire(often(program, writes), (0, 0.1), rounds)
    alone, alone_lingering = on_the_wire(seldom, (0, 0.1), rounds)
    job = {"work": "latency", "writes": writes}
    written = [read(READER, job, None, is_pinned=False) for _ in range(rounds)]
    ways = {
        "wire to Python": sent,
        "wire to Python, linger 100 ms": lingering,
        "wire to Python, each after a second of silence": alone,
        "the same, linger 100 ms": alone_lingering,
        "write to Python, through the embedded cluster": [
            sample.measured["latency"] for sample in written
        ],
    }
    lines = ["| one change every 0.5 ms | p50 | p99 | p99.9 |", "|---|---|---|---|"]
    for name, samples in ways.items():
        of = [statistics.median(sample[part] for sample in samples) * 1e6 for part in samples[0]]
        lines.append(f"| {name} | " + " | ".join(f"{each:.0f} µs" for each in of) + " |")
    return [*lines, ""]


def beside_rust(program: Path, passes: int, rounds: int) -> list[str]:
    """Batches in Python compared with Rust, from a sender that is faster than both."""
    lines = [
        "| ready frames to batches | Rust | Python | of Rust | a batch |",
        "|---|---|---|---|---|",
    ]
    for value_len in (256, 1024):
        pairs = with_rust(program, passes, value_len, rounds)
        ratio = statistics.median(rust.seconds / python.seconds for rust, python in pairs)
        changes = pairs[0][0].measured["changes"]
        speed = [
            changes / statistics.median(pair[which].seconds for pair in pairs) / 1e6
            for which in (0, 1)
        ]
        more = statistics.median(
            (python.seconds - rust.seconds) / python.measured["batches"] for rust, python in pairs
        )
        lines.append(
            f"| {value_len} B | {speed[0]:.2f} M/s | {speed[1]:.2f} M/s | {ratio:.0%} "
            f"| {more * 1e6:+.1f} µs |"
        )
    return [*lines, ""]


def with_rust(
    program: Path, passes: int, value_len: int, rounds: int
) -> list[tuple[Figures, Figures]]:
    """Reads ready frames in turns in Rust and in Python."""
    sender = [str(program), "ready", str(passes), str(value_len), "16"]
    pairs = []
    with serving(sender, None) as job:
        for round_number in range(rounds + 1):
            rust = read([str(program), "batches"], {**job, "buffer": 8 << 20}, job["documents"])
            python = read(READER, {**job, "work": "batches"}, job["documents"])
            if round_number:
                pairs.append((rust, python))
    return pairs


def in_spark(program: str, job: dict[str, Any]) -> list[str]:
    """Returns the output of a program in Spark."""
    process = subprocess.run(
        [*PYTHON, str(HERE / program)],
        input=json.dumps(job) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{program} failed:\n{process.stderr[-4000:]}")
    return process.stdout.splitlines()


def beside_cached(
    program: Path, documents: int, rounds: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Reads in Spark, and cached batches beside a drain and beside as many bytes.

    Returns:
        For each way to read, the seconds of each round: of the cached batches, beside one and the
        other, and of ours.
    """
    wanted = {**BASE, "documents": documents}
    with (
        serving([*PYTHON, str(HERE / "source.py")], wanted, is_pinned=False) as source,
        tempfile.TemporaryDirectory() as folder,
    ):
        job = {**source, "documents": documents, "rounds": rounds, "folder": folder}
        job["program"] = str(program)
        found: dict[str, list[tuple[float, float, float]]] = json.loads(
            in_spark("in_spark.py", job)[-1]
        )
        return found


def spark(program: Path, documents: int, rounds: int) -> list[str]:
    """Ways to read in Spark, compared with cached batches."""
    lines = [
        (
            f"| Spark, {documents:,} rows of 256 B | cached, while the cluster sends to a drain "
            "| cached, while as many bytes are sent | read | of the first | of the second |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for name, samples in beside_cached(program, documents, rounds).items():
        speeds = [
            documents / statistics.median(one[which] for one in samples) for which in range(3)
        ]
        ratios = [statistics.median(one[which] / one[2] for one in samples) for which in (0, 1)]
        told = [f"{speed / 1e6:.2f} M" for speed in speeds] + [f"{ratio:.0%}" for ratio in ratios]
        lines.append(f"| {name} | {' | '.join(told)} |")
    return [*lines, ""]


def spark_node(program: Path, documents: int, rounds: int) -> list[str]:
    """Reads in Spark from a source that writes like a node, compared with Parquet files."""
    lines = []
    sender = [str(program), "node", str(documents), "256", "64"]
    heads = {
        False: f"| Spark, {documents:,} rows of 256 B | s | rows/s | of Parquet's time |",
        True: f"| micro-batches of {documents // 10:,} rows | first | last | rows/s |",
    }
    with serving(sender, None, is_pinned=False) as source:
        for batches, head in heads.items():
            with tempfile.TemporaryDirectory() as folder:
                job = {**source, "rounds": rounds, "folder": folder, "batches": batches}
                lines += [head, "|---|---|---|---|", *in_spark("in_spark_node.py", job), ""]
    return lines


@dataclass(frozen=True)
class Shape:
    """Small micro-batches."""

    vbuckets: int
    tasks: int
    # Whether the same documents are written again and again.
    again: bool = False

    def __str__(self) -> str:
        own = f"{self.vbuckets} vBuckets, {self.tasks} task{'s' * (self.tasks > 1)}"
        return own + ", the same documents" * self.again

    def measure(self, rounds: int) -> dict[str, list[dict[str, float]]]:
        """Returns the milliseconds of each phase in each round, of a cached source and ours."""
        job = {"vbuckets": self.vbuckets, "tasks": self.tasks, "again": self.again}
        told = in_spark("in_batches.py", {**job, "rounds": rounds})
        found: dict[str, list[dict[str, float]]] = json.loads(told[-1])
        return found


SHAPES = (Shape(64, 1), Shape(64, 4), Shape(64, 8), Shape(1024, 1), Shape(1024, 8))
AGAIN = Shape(64, 8, again=True)


def micro_batches(rounds: int) -> list[str]:
    """The cost of a small micro-batch, compared with a source that already has its row."""
    lines = [
        "| a micro-batch of a few rows | all | `latestOffset` | planning | tasks | of cached |",
        "|---|---|---|---|---|---|",
    ]
    for shape in (*SHAPES, AGAIN):
        found = shape.measure(rounds)
        ratios = ratios_to_cached(found)
        for name, samples in found.items():
            middle = [statistics.median(each[part] for each in samples) for part in samples[0]]
            told = " | ".join(f"{each:.0f} ms" for each in middle)
            of_cached = "" if name == "cached" else f"{statistics.median(ratios):.0%}"
            lines.append(f"| {name}, {shape} | {told} | {of_cached} |")
    return [*lines, ""]


def ratios_to_cached(found: dict[str, list[dict[str, float]]]) -> list[float]:
    """Returns the time of a micro-batch, of a cached source's, in each round."""
    pairs = zip(found["dcp_rs"], found["cached"], strict=True)
    return [own["triggerExecution"] / other["triggerExecution"] for own, other in pairs]


# The groups in order, each with its own place in the documentation.
GROUPS = (
    *("ready", "rows", "latency", "spark", "spark-node", "batches"),
    *("carried", "growth", "nodes", "long"),
)
# Values of 256 B that fit into a pass of ready-made frames.
ROWS_A_PASS = 3300


def measure(group: str, chosen: argparse.Namespace) -> list[str]:
    """Measures one group."""
    program, documents, rounds = chosen.program, chosen.documents, chosen.rounds
    if group in PLOTS:
        lines, drawn = (
            growth(chosen.largest, rounds) if group == "growth" else long(program, chosen.long)
        )
        if not chosen.no_write:
            PLOTS[group].write_text(drawn)
        return lines
    return {
        "ready": lambda: beside_rust(program, 512, rounds),
        "rows": lambda: rows(min(documents, 500_000), rounds),
        "latency": lambda: latency(program, 5000, rounds),
        "spark": lambda: spark(program, documents, rounds),
        "spark-node": lambda: spark_node(program, documents, rounds),
        "batches": lambda: micro_batches(max(1, rounds // 2)),
        "carried": lambda: carried(documents, rounds),
        "nodes": lambda: nodes(program, documents, rounds),
    }[group]()


def how_often(group: str, rounds: int) -> str:
    """Says of how many runs the figures of a group are."""
    if group == "long":
        return "One run each"
    if group == "batches":
        return f"Medians of {max(1, rounds // 2)} rounds of 40 micro-batches"
    return f"Medians of {rounds} rounds"


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--program", type=Path, required=True, help="path of the built example `peers`"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--largest", type=int, default=10_000_000)
    parser.add_argument("--long", type=int, default=100_000_000, metavar="CHANGES")
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=GROUPS, metavar="GROUP")
    parser.add_argument("--no-write", action="store_true", help="print the tables instead")
    return parser.parse_args()


def main() -> None:
    """Measures, and writes the results."""
    chosen = arguments()
    machine = subprocess.run(
        [str(chosen.program), "machine"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for group in chosen.only:
        before = os.getloadavg()[0]
        lines = measure(group, chosen)
        head = (
            f"{how_often(group, chosen.rounds)}; "
            f"{machine}; load {before:.1f} before and "
            f"{os.getloadavg()[0]:.1f} after; Python {sys.version.split()[0]}; "
            f'`make bench-reading ARGS="--only {group}"`.'
        )
        if chosen.no_write:
            print("\n".join([head, "", *lines]))
            continue
        record(f"reading {group}", head, lines)


if __name__ == "__main__":
    main()
