"""Measures reads in Spark from outside: time, processor, and the memory of all processes.

`make bench-spark` runs this and writes its table to docs/performance.json. Each case is a Spark
session of its own, which reads everything several times: *first* is the first time, when Spark
starts its Python processes and the JVM has compiled nothing; *later* is the median of the others.
Processor time is that of the later reads, of the driver, the JVMs and their Python processes
together. Memory is the largest sum of their proportional shares (PSS), so that pages that processes
share count once.

The source writes as a node does, in a process of its own. With the jars of the Couchbase Spark
connector in `COUCHBASE_SPARK_JARS`, separated by commas, the connector is measured as well, and all
read from the embedded cluster instead, since the connector needs more of a node than its data port.
Nothing is written if anything fails or a row is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from run import BASE, HERE, PYTHON, record, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUPS = {"local": "local[2]", "cluster": "local-cluster[3,1,1024]"}
LATER = 4
# Goals, in seconds and MiB: 0.8 times the time and 1.4 times the memory of Couchbase's connector,
# and what Python's part may take.
FIRST, LATER_ONES, ALL_MIB, PYTHON_MIB = 6.5, 1.7, 1120, 350
TICKS = os.sysconf("SC_CLK_TCK")
# Seconds between two looks at the memory of all processes, which cost about 5 ms.
LOOK = 0.2


def family(root: int) -> list[int]:
    """Returns the processes that descend from one, and itself."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(text.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for each in found:
        found += children.get(each, ())
    return found


def processor(root: int) -> float:
    """Returns the seconds of processor that a family has used, with its members that ended."""
    total = 0
    for pid in family(root):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        total += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return total / TICKS


@dataclass
class Memory:
    """The largest sums of proportional shares, in MiB."""

    all: float = 0
    python: float = 0
    processes: int = 0


class Watch:
    """Watches the memory of a family of processes on a thread of its own."""

    def __init__(self, root: int) -> None:
        self.peak = Memory()
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(LOOK):
            every = python = count = 0
            for pid in family(self._root):
                try:
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                except OSError:
                    continue
                share = next(
                    (int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:"), 0
                )
                every += share
                # The driver's own Python is the user's program, which does no work.
                if name.startswith("python") and pid != self._root:
                    python += share
                    count += 1
            peak = self.peak
            peak.all = max(peak.all, every / 1024)
            peak.python = max(peak.python, python / 1024)
            peak.processes = max(peak.processes, count)

    def stop(self) -> None:
        """Ends it."""
        self._stop.set()
        self._thread.join()


@dataclass
class Figures:
    """What was measured of a case, in each of its sessions."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)


@contextmanager
def session(job: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Runs a driver; it has started Spark when it is handed over."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore", str(HERE / "in_session.py")]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=job["folder"]
        )
        try:
            tell(process, job)
            yield process
            process.stdin.close()
            process.wait(60)
        except BaseException:
            process.kill()
            process.wait()
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise


def tell(process: subprocess.Popen[str], what: object) -> Any:
    """Writes a line to a driver, and returns what it answers."""
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline() or sys.exit("a driver failed"))


def measure(job: dict[str, Any], figures: Figures) -> None:
    """Measures one session of a case."""
    with session(job) as process:
        watch = Watch(process.pid)
        try:
            took = []
            for number in range(1 + LATER):
                if number == 1:
                    used = processor(process.pid)
                told = tell(process, "read")
                if told["rows"] != job["documents"]:
                    sys.exit(f"{job['source']}: {told['rows']} of {job['documents']} rows came")
                took.append(told["seconds"])
            used = processor(process.pid) - used
        finally:
            watch.stop()
    figures.first.append(took[0])
    figures.later.append(statistics.median(took[1:]))
    figures.cpu.append(used / LATER)
    figures.memory.append(watch.peak)


def sources(jars: str) -> list[str]:
    """Returns what is measured, the one that others are compared with last."""
    return ["dcp_rs", "cached Python source", "Parquet", *(["connector"] if jars else [])]


def group(chosen: argparse.Namespace, setup: str, mode: str, shape: tuple[int, int]) -> str:
    """Measures the sources with one shape of documents; returns a row of the table."""
    documents, value_len = shape
    jars = os.environ.get("COUCHBASE_SPARK_JARS", "")
    if jars:
        wanted = {**BASE, "documents": documents, "value_len": value_len}
        command = [*PYTHON, str(HERE / "source.py")]
    else:
        wanted = None
        command = [str(chosen.program), "node", str(documents), str(value_len), "64"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(command, wanted, is_pinned=False) as served,
    ):
        job = {**served, "documents": documents, "mode": mode, "folder": folder, "jars": jars}
        job |= {"master": SETUPS[setup], "tasks": 2 if setup == "local" else 3}
        with session({**job, "mode": "prepare", "master": SETUPS["local"]}):
            pass
        figures = {name: Figures() for name in sources(jars)}
        for number in range(chosen.rounds):
            for name, of in figures.items():
                if mode == "batch" and name == "connector":
                    continue  # it has none
                measure({**job, "source": name}, of)
                print(f"  {setup} {mode} {shape} {number} {name}: {of}", file=sys.stderr)
    return row(setup, mode, shape, figures)


def row(setup: str, mode: str, shape: tuple[int, int], figures: dict[str, Figures]) -> str:
    """Returns a row of the table: medians of the sources, with what misses its goal in bold."""
    measured = [of for of in figures.values() if of.first]
    documents, value_len = shape
    # Goals are of Couchbase's connector, where its figures are known.
    is_known = (setup, shape) == ("local", (200_000, 256))
    cells = [f"{SETUPS[setup]}, {mode}", f"{documents:,} of {value_len} B"]
    for values, goal, digits in (
        ([of.first for of in measured], FIRST if is_known else None, 1),
        ([of.later for of in measured], LATER_ONES if is_known else None, 2),
        ([of.cpu for of in measured], None, 2),
        ([[each.all for each in of.memory] for of in measured], ALL_MIB if is_known else None, 0),
        ([[each.python for each in of.memory] for of in measured], PYTHON_MIB, 0),
    ):
        medians = [statistics.median(each) for each in values]
        shown = [f"{each:.{digits}f}" for each in medians]
        if goal is not None and medians[0] > goal:
            shown[0] = f"**{shown[0]}**"
        cells.append(", ".join(shown))
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--program", type=Path, required=True, help="path of the built example `peers`"
    )
    parser.add_argument("--rounds", type=int, default=3, help="sessions of each case")
    parser.add_argument("--documents", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--value-len", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--setup", choices=SETUPS, nargs="+", default=list(SETUPS))
    parser.add_argument(
        "--mode", choices=("batch", "stream"), nargs="+", default=["batch", "stream"]
    )
    parser.add_argument("--no-write", action="store_true", help="print the tables instead")
    return parser.parse_args()


def main() -> None:
    """Measures, and writes the results."""
    chosen = arguments()
    machine = subprocess.run(
        [str(chosen.program), "machine"], capture_output=True, text=True, check=True
    ).stdout.strip()
    before, began = os.getloadavg()[0], time.monotonic()
    lines = [
        "| Spark | documents | first, s | later, s | CPU, s | all, MiB | Python, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for setup, mode, documents, value_len in product(
        chosen.setup, chosen.mode, chosen.documents, chosen.value_len
    ):
        lines.append(group(chosen, setup, mode, (documents, value_len)))
    head = (
        f"{', '.join(sources(os.environ.get('COUCHBASE_SPARK_JARS', '')))}; medians of "
        f"{chosen.rounds} sessions; {machine}; load {before:.1f} before; Python "
        f"{sys.version.split()[0]}; {(time.monotonic() - began) / 60:.0f} minutes; "
        "`make bench-spark`."
    )
    if chosen.no_write:
        print("\n".join([head, "", *lines]))
        return
    record("spark", head, lines)


if __name__ == "__main__":
    main()
