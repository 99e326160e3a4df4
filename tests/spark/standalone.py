"""Spark's standalone cluster on this machine: a master, and workers that can be killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 240
HOST = "127.0.0.1"
# JVMs that live for minutes.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Standalone:
    """A master and workers of one core, each with an executor for the application.

    Attributes:
        master: The URL for `SparkSession.builder.master`.
        workers: The processes of the workers.
    """

    # What an application needs to run on it.
    SETTINGS = {  # noqa: RUF012 - read only
        "spark.executor.memory": "600m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": QUICK,
        "spark.driver.extraJavaOptions": QUICK,
    }

    def __init__(self, folder, workers=2, **environment):
        self._folder = Path(folder)
        self._environment = os.environ | {
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK,
            "PYSPARK_PYTHON": sys.executable,
            # So that tasks can use these modules.
            "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
            **environment,
        }
        self._started = 0
        self._leader = self._start("master.Master", HOST, "--port", "0")
        told = self._told("master-0", r"Starting Spark master at (spark://\S+)", self._leader)
        self.master = told[1]
        self.workers = []
        for _ in range(workers):
            self.add_worker()

    def _start(self, name, host, *arguments):
        import pyspark

        program = Path(pyspark.__file__).parent / "bin" / "spark-class"
        log = self._folder / f"{name.partition('.')[0]}-{self._started}.log"
        self._started += 1
        command = [program, f"org.apache.spark.deploy.{name}", "--host", host]
        with log.open("wb") as file:
            # Executors are in the group of their worker.
            return subprocess.Popen(
                [*command, "--webui-port", "0", *arguments],
                env=self._environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _told(self, log, pattern, process):
        return wait_for(lambda: re.search(pattern, self.log(log)), process)

    def log(self, name):
        """What a process has logged: `master-0`, `worker-1` and so on."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def add_worker(self, host=HOST):
        """Starts a worker, and waits until the master has it."""
        name = f"worker-{self._started}"
        arguments = ("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / "work"))
        worker = self._start("worker.Worker", host, *arguments, self.master)
        self._told(name, "Successfully registered with master", worker)
        self.workers.append(worker)

    def executors(self):
        """Gives the ids of the processes of executors."""
        workers = {worker.pid for worker in self.workers}
        return sorted(process for process in processes() if parent(process) in workers)

    def kill_executor(self, executor):
        """Kills an executor; its worker starts another."""
        os.kill(executor, signal.SIGKILL)
        wait_for(lambda: not is_alive(executor))

    def kill_worker(self, number):
        """Kills a worker, whose executor then ends itself, and starts another."""
        worker = self.workers.pop(number)
        worker.kill()
        worker.wait(PATIENCE)
        self.add_worker()

    def close(self):
        for process in (*self.workers, self._leader):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait(PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def wait_for(found, process=None, patience=PATIENCE):
    """Waits until a function gives something true; gives it."""
    deadline = time.monotonic() + patience
    while not (value := found()):
        assert process is None or process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.02)
    return value


def processes():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _status(process, name):
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return re.search(rf"^{name}:\s*(\S+)", status, re.MULTILINE)[1]


def parent(process):
    """Gives the parent of a process; 0 if there is no such process."""
    return int(_status(process, "PPid") or 0)


def is_alive(process):
    return _status(process, "State") not in ("", "Z")
