"""Compares the resources that clients need to read and count the same changes.

`make bench-peers` builds the clients, runs this, and writes docs/performance.json and its plots.
Every round runs each client once, one after the other, against one source, or against a server with
documents, given by --connection-string. There are three sources: one with the write pattern of a
node; an embedded producer; and recorded streams of such a producer replayed from memory, faster
than any other client reads. Nothing of a group of tables is written if any of its runs fails or
counts wrong numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figures import record
from plot import draw

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
STATE = ROOT / ".state"
# The clients' log output, which is large.
LOG = STATE / "log" / "peers.log"

# Required by java-dcp-client.
VBUCKETS = 1024
WINDOW = 8 << 20
PATIENCE = 600
DRAIN, NAPPING = "plain drain", "plain drain, naps of 500 us"


@dataclass
class Peer:
    """A client's program."""

    name: str
    command: list[str]
    # Whether its process reads from more than one node.
    cluster: bool = True
    # Whether it waits for a second line before it begins.
    waits: bool = False
    # Job options in addition to the common ones.
    job: dict = field(default_factory=dict)


@dataclass
class Sample:
    """Resources used by one run."""

    changes: int
    seconds: float
    cpu: float
    peak: float
    # Voluntary context switches, in thousands.
    waits: float


# Options of dcp_rs in Python with their own row, each compared with the plain stream. The stream
# only delivers decompressed values, so python-snappy is measured in the loop without a library.
PLAIN = "plain stream"
SNAPPY = "plain Python loop, `python-snappy` for each value"
FIELDS = "id BIGINT, name STRING, price DOUBLE, stock BOOLEAN, body STRING"
OPTIONS: dict[str, dict] = {
    PLAIN: {},
    "`persisted_only`": {"stream": {"persisted_only": True}},
    "`columns` without the value": {"stream": {"columns": ["op", "vbucket", "seqno", "key"]}},
    "`collections`, of one": {"stream": {"collections": ["_default._default"]}},
    '`include="xattrs"`': {"stream": {"include": "xattrs"}},
    '`value_format="string"`': {"stream": {"value_format": "string"}},
    '`value_format="variant"`': {"stream": {"value_format": "variant"}},
    "`document_schema`": {"stream": {"document_schema": FIELDS}},
    "plain, then `orjson` for each value": {"parser": "orjson"},
    "plain, then `pyarrow.json` for each batch": {"parser": "pyarrow"},
    "`compressed`": {"compressed": True},
    SNAPPY: {"compressed": True},
    "TLS": {"tls": True},
    "`buffer_size` of 1 MiB": {"buffer": 1 << 20},
    "of 13 MiB": {"buffer": 13 << 20},
    "of 64 MiB": {"buffer": 64 << 20},
}


def option_peers() -> list[Peer]:
    """Returns dcp_rs in Python with each of the options."""
    python = [sys.executable, "-W", "ignore"]
    programs = {SNAPPY: "plain_loop.py"}
    return [
        Peer(name, [*python, str(HERE / programs.get(name, "batches.py"))], job=job)
        for name, job in OPTIONS.items()
    ]


def peers(program: Path) -> list[Peer]:
    """Returns the clients in the order of the tables."""
    java = STATE / "interop" / "java"
    go = STATE / "interop" / "go"
    classes = f"{java}/classes:{java}/dependency/*"
    python = [sys.executable, "-W", "ignore"]
    return [
        Peer("dcp_rs (Rust)", [str(program), "count"]),
        Peer("dcp_rs (Python)", [*python, str(HERE / "batches.py")]),
        Peer("java-dcp-client", ["java", "-Xmx512m", "-cp", classes, "Drain"]),
        Peer("gocbcore", [str(go / "gocbcore")]),
        Peer("go-dcp", [str(go / "godcp")]),
        Peer("plain Python loop", [*python, str(HERE / "plain_loop.py")], cluster=False),
    ]


def start(command: list[str], core: int | None) -> subprocess.Popen[str]:
    """Starts a program, pinned to a core if given."""
    cores = os.sched_getaffinity(0)
    if core is not None:
        # A new process inherits the core of its parent.
        os.sched_setaffinity(0, {core})
    try:
        pipe = subprocess.PIPE
        with LOG.open("a") as log:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
    finally:
        os.sched_setaffinity(0, cores)


@dataclass
class Source:
    """A program that serves the clients, and its job for them."""

    process: subprocess.Popen[str]
    job: dict

    @classmethod
    def begin(cls, command: list[str], core: int | None) -> Source:
        """Waits until it is ready."""
        process = start(command, core)
        text = process.stdout.readline()
        if not text:
            sys.exit(f"the producer failed with {process.wait()}")
        return cls(process, json.loads(text))

    def end(self) -> str:
        """Ends it; returns its final output."""
        told, _ = self.process.communicate()
        if self.process.returncode:
            sys.exit(f"the producer failed with {self.process.returncode}")
        return told


def peak_mib(pid: int) -> float:
    """Returns the peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def run(peer: Peer, job: dict, core: int | None) -> Sample:
    """Runs a client once."""
    process = start(peer.command, core)
    process.stdin.write(json.dumps(job | peer.job) + "\n" + ("go\n" if peer.waits else ""))
    process.stdin.flush()
    counted = None
    for text in process.stdout:
        line = json.loads(text)
        if line["line"] == "counted":
            counted = line
            peak = peak_mib(process.pid)
            process.stdin.close()
        elif line.get("error"):
            sys.exit(f"{peer.name}: {line['error']}")
    process.stdout.close()
    # The whole process, including start-up.
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if counted is None or process.returncode:
        sys.exit(f"{peer.name} failed with {process.returncode}: see {LOG}")
    if job["documents"] is not None and counted["changes"] != job["documents"]:
        sys.exit(f"{peer.name} counts {counted['changes']} changes of {job['documents']}")
    cpu = used.ru_utime + used.ru_stime
    return Sample(counted["changes"], counted["seconds"], cpu, peak, used.ru_nvcsw / 1000)


def measure(
    job: dict, clients: list[Peer], rounds: int, core: int | None
) -> dict[str, list[Sample]]:
    """Returns the samples of every client, after a warm-up round."""
    samples: dict[str, list[Sample]] = {peer.name: [] for peer in clients}
    for round_number in range(rounds + 1):
        for peer in clients:
            sample = run(peer, job, core)
            if round_number:
                samples[peer.name].append(sample)
            speed = sample.changes / sample.seconds / 1e6
            print(
                f"  {round_number} {peer.name}: {speed:.2f} M/s, {sample.cpu:.2f} s of processor, "
                f"{sample.waits:.0f} k waits"
            )
    counts = {sample.changes for all_samples in samples.values() for sample in all_samples}
    if len(counts) != 1:
        sys.exit(f"the clients do not agree on how many changes there are: {sorted(counts)}")
    return samples


def middle(samples: list[Sample]) -> Sample:
    """Returns the median of each metric separately, per million changes."""
    million = samples[0].changes / 1e6
    return Sample(
        samples[0].changes,
        statistics.median(sample.seconds for sample in samples) / million,
        statistics.median(sample.cpu for sample in samples) / million,
        statistics.median(sample.peak for sample in samples),
        statistics.median(sample.waits for sample in samples) / million,
    )


def job_of(given: dict, documents: int | None) -> dict:
    """Returns the job common to all clients."""
    return {
        **given,
        "documents": documents,
        "buffer": WINDOW,
        "collections": True,
        "compression": "off",
        "count": True,
    }


def table(value: str, medians: dict[str, Sample]) -> list[str]:
    """Returns the results for one value length as Markdown."""
    ours = medians["dcp_rs (Rust)"]
    lines = [
        f"| {value} | s | changes/s | of Rust | CPU s | of Rust | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sample in medians.items():
        lines.append(
            f"| {name} | {sample.seconds:.2f} | {1 / sample.seconds:.2f} M "
            f"| {ours.seconds / sample.seconds:.0%} | {sample.cpu:.2f} "
            f"| {sample.cpu / ours.cpu:.1f} times | {sample.peak:.0f} |"
        )
    return [*lines, ""]


def elapsed_table(value: str, samples: dict[str, list[Sample]]) -> list[str]:
    """Returns the elapsed times for one value length as Markdown, with ratios by round."""
    ours, *others = samples
    lines = [f"| {value} | s | changes/s | dcp_rs (Rust) is |", "|---|---|---|---|"]
    for name in [ours, *others]:
        seconds = middle(samples[name]).seconds
        rounds = zip(samples[name], samples[ours], strict=True)
        ratio = statistics.median(theirs.seconds / own.seconds for theirs, own in rounds)
        told = "" if name == ours else f"{ratio:.1f} times"
        lines.append(f"| {name} | {seconds:.3f} | {1 / seconds:.2f} M | {told} |")
    return [*lines, ""]


def node_table(value: str, samples: dict[str, list[Sample]]) -> list[str]:
    """Returns the results for a source like a node as Markdown, with ratios by round."""
    reference = samples[NAPPING]
    lines = [
        f"| {value} | s | of the napping drain | CPU s | of the napping drain | waits | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in samples.items():
        medians = middle(own)
        rounds = list(zip(own, reference, strict=True))
        seconds = statistics.median(one.seconds / other.seconds for one, other in rounds)
        cpu = statistics.median(one.cpu / other.cpu for one, other in rounds)
        lines.append(
            f"| {name} | {medians.seconds:.2f} | {seconds:.2f} times | {medians.cpu:.2f} "
            f"| {cpu:.2f} times | {medians.waits:.1f} k | {medians.peak:.0f} |"
        )
    return [*lines, ""]


def options_table(samples: dict[str, list[Sample]]) -> list[str]:
    """Returns the cost of options as Markdown, with ratios by round."""
    reference = samples[PLAIN]
    lines = [
        "| 256 B | s | speed, of the plain stream | CPU s | of the plain stream | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in samples.items():
        medians = middle(own)
        rounds = list(zip(own, reference, strict=True))
        speed = statistics.median(plain.seconds / one.seconds for one, plain in rounds)
        cpu = statistics.median(one.cpu / plain.cpu for one, plain in rounds)
        lines.append(
            f"| {name} | {medians.seconds:.2f} | {speed:.0%} | {medians.cpu:.2f} "
            f"| {cpu:.2f} times | {medians.peak:.0f} |"
        )
    return [*lines, ""]


def first_line(*command: str) -> str:
    """Returns the first line that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return (done.stdout or done.stderr).splitlines()[0]


def versions() -> str:
    """Returns the versions of the clients and of their platforms."""
    go_mod = (ROOT / "tests/interop/go/go.mod").read_text().split()
    pom = (ROOT / "tests/interop/java/pom.xml").read_text()
    java_dcp = pom.split("<artifactId>dcp-client</artifactId>")[1].split("version>")[1]
    return ", ".join(
        [
            f"java-dcp-client {java_dcp.removesuffix('</')} on {first_line('java', '-version')}",
            f"gocbcore {go_mod[go_mod.index('github.com/couchbase/gocbcore/v10') + 1]}",
            f"go-dcp {go_mod[go_mod.index('github.com/Trendyol/go-dcp') + 1]}",
            first_line("go", "version"),
            f"Python {platform.python_version()}",
        ]
    )


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--changes", type=int, default=1_000_000, help="number of changes of up to 1 KiB"
    )
    parser.add_argument("--values", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument(
        "--program", type=Path, required=True, help="path of the built example `peers`"
    )
    parser.add_argument(
        "--only",
        choices=["node", "priority", "options", "embedded", "memory"],
        help="only measure one group of tables",
    )
    parser.add_argument(
        "--clients", nargs="+", help="only clients whose names contain one of these"
    )
    parser.add_argument("--no-write", action="store_true", help="print the tables instead")
    parser.add_argument("--connection-string", help="read from this server instead of a source")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--username", default="Administrator")
    chosen = parser.parse_args()
    # Clients differ in whether they request an empty vBucket, so a relay could not tell whether
    # every stream came from memory.
    relayed = chosen.only != "embedded" and not chosen.connection_string
    if relayed and chosen.changes < 2 * VBUCKETS:
        parser.error(f"--changes: at least {2 * VBUCKETS:,}, two for each vBucket")
    return chosen


def real_server(chosen: argparse.Namespace) -> dict:
    """Returns a job for a server; its password comes from DCP_PASSWORD."""
    hosts = chosen.connection_string.partition("://")[2].split(",")
    return {
        "connection_string": chosen.connection_string,
        "nodes": [host if ":" in host else f"{host}:11210" for host in hosts],
        "management": [f"http://{host.partition(':')[0]}:8091" for host in hosts],
        "bucket": chosen.bucket,
        "username": chosen.username,
        "password": os.environ["DCP_PASSWORD"],
    }


def changes_of(chosen: argparse.Namespace, value_len: int) -> int:
    """Returns the number of changes to read for a value length."""
    return chosen.changes if value_len <= 1024 else chosen.changes // 2


def drains(program: Path) -> list[Peer]:
    """Returns programs that only read headers and acknowledge."""
    drain = [str(program), "drain"]
    return [
        Peer(DRAIN, [*drain, "0"], waits=True),
        Peer(NAPPING, [*drain, "500"], waits=True),
    ]


def measure_node(
    chosen: argparse.Namespace, clients: list[Peer], of_source: int | None, of_client: int | None
) -> None:
    """Measures with a source like a node on the first core and the clients on the second."""
    readers = [*clients, *drains(chosen.program)]
    parts, load, sent_by = [], [], ""
    machine = first_line(str(chosen.program), "machine")
    for value_len in chosen.values:
        command = [str(chosen.program), "node", str(chosen.changes), str(value_len), str(VBUCKETS)]
        source = Source.begin(command, of_source)
        sent_by = source.job["congestion_control"]
        print(f"{chosen.changes} changes of {value_len} B as from a node")
        samples = measure(job_of(source.job, chosen.changes), readers, chosen.rounds, of_client)
        load.append(f"{os.getloadavg()[0]:.1f}")
        check_relayed(json.loads(source.end()), len(readers), chosen.rounds)
        parts += node_table(f"{value_len} B", samples)
    shape = (
        f"Per million changes; medians of {chosen.rounds} rounds; keys of 19 B in {VBUCKETS} "
        f"vBuckets, {chosen.changes:,} changes, flow-control buffer 8 MiB, at medium priority, "
        f"sent with {sent_by}. "
        + ("Source and client pinned to a core each. " if of_client is not None else "")
        + "Processor time, waits and peak are those of the whole process, start-up included. "
        f"{machine}; load at the end of each size: {', '.join(load)}. {versions()}."
    )
    if chosen.no_write:
        print("\n".join([shape, "", *parts]))
        return
    draw("peers of a node", record("peers of a node", shape, parts))


def measure_priorities(
    chosen: argparse.Namespace, of_source: int | None, of_client: int | None
) -> None:
    """Measures dcp_rs with a source like a node at each priority."""
    ours = [peer for peer in peers(chosen.program) if peer.name.startswith("dcp_rs")]
    readers = [*ours, *drains(chosen.program)]
    parts, load, sent_by = [], [], ""
    machine = first_line(str(chosen.program), "machine")
    for priority, source_name in (("low", "node-low"), ("medium", "node"), ("high", "node-high")):
        command = [str(chosen.program), source_name, str(chosen.changes), "256", str(VBUCKETS)]
        source = Source.begin(command, of_source)
        sent_by = source.job["congestion_control"]
        print(f"{chosen.changes} changes of 256 B as from a node at {priority} priority")
        samples = measure(job_of(source.job, chosen.changes), readers, chosen.rounds, of_client)
        load.append(f"{os.getloadavg()[0]:.1f}")
        check_relayed(json.loads(source.end()), len(readers), chosen.rounds)
        parts += node_table(f"256 B, `{priority}`", samples)
    shape = (
        f"Per million changes; medians of {chosen.rounds} rounds; as in the tables above, at each "
        f"priority; {chosen.changes:,} changes, sent with {sent_by}; "
        f'`make bench-peers ARGS="--only priority"`. {machine}; load at the end of each '
        f"priority: {', '.join(load)}; Python {platform.python_version()}."
    )
    if chosen.no_write:
        print("\n".join([shape, "", *parts]))
        return
    record("priorities of a node", shape, parts)


def measure_options(
    chosen: argparse.Namespace, of_source: int | None, of_client: int | None
) -> None:
    """Measures the cost of options, with documents with fields, sent like a node."""
    readers = option_peers()
    command = [str(chosen.program), "objects", str(chosen.changes), "256", str(VBUCKETS)]
    source = Source.begin(command, of_source)
    print(f"{chosen.changes} documents of 256 B as from a node")
    samples = measure(job_of(source.job, chosen.changes), readers, chosen.rounds, of_client)
    load = f"{os.getloadavg()[0]:.1f}"
    check_relayed(json.loads(source.end()), len(readers), chosen.rounds)
    machine = first_line(str(chosen.program), "machine")
    shape = (
        f"Per million changes; medians of {chosen.rounds} rounds; {chosen.changes:,} JSON "
        f"documents of 256 B with five fields, keys of 19 B in {VBUCKETS} vBuckets, flow-control "
        f"buffer 8 MiB, from a source that writes as a node does; dcp_rs in Python, start-up "
        f'included in processor time; `make bench-peers ARGS="--only options"`. {machine}; load '
        f"at the end: {load}."
    )
    parts = options_table(samples)
    if chosen.no_write:
        print("\n".join([shape, "", *parts]))
        return
    record("options on a node", shape, parts)


def measure_embedded(
    chosen: argparse.Namespace, clients: list[Peer], of_source: int | None, of_client: int | None
) -> None:
    """Measures with an embedded producer on the first core and the clients on the second."""
    parts, load = [], []
    machine = first_line(str(chosen.program), "machine")
    for value_len in chosen.values:
        changes = changes_of(chosen, value_len)
        print(f"{changes} changes of {value_len} B")
        command = [str(chosen.program), "source", str(changes), str(value_len), str(VBUCKETS)]
        source = Source.begin(command, of_source)
        samples = measure(job_of(source.job, changes), clients, chosen.rounds, of_client)
        load.append(f"{os.getloadavg()[0]:.1f}")
        source.end()
        medians = {name: middle(all_samples) for name, all_samples in samples.items()}
        parts += table(f"{value_len} B", medians)
    shape = (
        f"Per million changes; medians of {chosen.rounds} rounds; keys of 19 B in {VBUCKETS} "
        f"vBuckets, {chosen.changes:,} changes (half as many of 4 KiB), flow-control buffer "
        "8 MiB, from the disk image. "
        + ("Cluster and client pinned to a core each. " if of_client is not None else "")
        + "Processor time and peak are those of the whole process, start-up included; elapsed "
        f"time begins with the first stream request. {machine}; load at the end of each size: "
        f"{', '.join(load)}. {versions()}; `java -Xmx512m`."
    )
    if chosen.no_write:
        print("\n".join([shape, "", *parts]))
        return
    draw("peers", record("peers", shape, parts))


def measure_memory(
    chosen: argparse.Namespace, clients: list[Peer], of_source: int | None, of_client: int | None
) -> None:
    """Measures with streams from memory on the first core and the clients on the second."""
    readers = [*clients, drains(chosen.program)[0]]
    parts, load, sent_by = [], [], ""
    machine = first_line(str(chosen.program), "machine")
    for value_len in chosen.values:
        changes = changes_of(chosen, value_len)
        print(f"{changes} changes of {value_len} B from memory")
        command = [str(chosen.program), "recorded", str(changes), str(value_len), str(VBUCKETS)]
        source = Source.begin(command, of_source)
        sent_by = source.job["congestion_control"]
        samples = measure(job_of(source.job, changes), readers, chosen.rounds, of_client)
        load.append(f"{os.getloadavg()[0]:.1f}")
        check_relayed(json.loads(source.end()), len(readers), chosen.rounds)
        parts += elapsed_table(f"{value_len} B", samples)
    shape = (
        f"Medians of {chosen.rounds} rounds after one in which the streams were recorded; s per "
        f"million changes; {chosen.changes:,} changes (half as many of 4 KiB) in {VBUCKETS} "
        f"vBuckets, flow-control buffer 8 MiB, sent with {sent_by}. "
        + ("Source and client pinned to a core each. " if of_client is not None else "")
        + f"{machine}; load at the end of each size: {', '.join(load)}. {versions()}."
    )
    if chosen.no_write:
        print("\n".join([shape, "", *parts]))
        return
    draw("peers from memory", record("peers from memory", shape, parts))


def check_relayed(relayed: dict, readers: int, rounds: int) -> None:
    """Checks that all streams measured came from memory."""
    a_round = readers * VBUCKETS
    asked = relayed["forwarded"] + relayed["from_memory"]
    if asked != (rounds + 1) * a_round or relayed["from_memory"] < rounds * a_round:
        sys.exit(f"not all streams came from memory: {relayed}, {a_round} a round")
    print(f"  {relayed['from_memory']} streams from memory, {relayed['bytes'] >> 20} MiB")


def main() -> None:
    """Measures, and writes the results."""
    chosen = arguments()
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.unlink(missing_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    # The producer and the client each have their own core.
    of_source, of_client = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    clients = peers(chosen.program)
    if chosen.clients:
        clients = [one for one in clients if any(part in one.name for part in chosen.clients)]
    if chosen.connection_string:
        job = real_server(chosen)
        clients = [peer for peer in clients if peer.cluster or len(job["nodes"]) == 1]
        samples = measure(job_of(job, None), clients, chosen.rounds, None)
        medians = {name: middle(all_samples) for name, all_samples in samples.items()}
        print("\n".join(table("documents of the server", medians)))
        return
    if chosen.only in (None, "node"):
        measure_node(chosen, clients, of_source, of_client)
    if chosen.only in (None, "priority"):
        measure_priorities(chosen, of_source, of_client)
    if chosen.only in (None, "options"):
        measure_options(chosen, of_source, of_client)
    if chosen.only in (None, "embedded"):
        measure_embedded(chosen, clients, of_source, of_client)
    if chosen.only in (None, "memory"):
        measure_memory(chosen, clients, of_source, of_client)


if __name__ == "__main__":
    main()
