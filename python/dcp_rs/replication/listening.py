"""What `dcp_rs.replicate` answers on its listener: `/livez`, `/readyz`, `/status`, `/metrics`."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from dcp_rs import _dcp_rs
from dcp_rs._figures import Source
from dcp_rs._libraries import require
from dcp_rs._listener import Answer, Listener, not_found
from dcp_rs.metrics import PrometheusCollector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from dcp_rs._listener import Request
    from dcp_rs.replication.health import Health

# Warnings that `/status` has, of which each may have come often.
_WARNINGS = 20
_STATES = ("opening", "streaming", "backing_off", "complete", "failed", "disconnected")


class Listening:
    """Listens while a replication runs.

    Args:
        address: Where, as for `dcp_rs.replicate`.
        health: What the replication does.

    Raises:
        ConfigError: The address is none, or cannot be listened on.
        ImportError: `prometheus_client` is not installed.
    """

    def __init__(self, address: str, health: Health) -> None:
        self._health = health
        self._exposition: Any = require("listen", "prometheus_client.exposition", "prometheus")
        self._warnings = _Warnings(health)
        self._metrics = {
            is_long: _registry(health, self._warnings, vbuckets=is_long)
            for is_long in (False, True)
        }
        self._paths = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/status": self._status,
            "/metrics": self._exported,
        }
        self._listener = Listener(address, self._answer)
        self.url = self._listener.url

    def __enter__(self) -> Self:
        logging.getLogger("dcp_rs").addHandler(self._warnings)
        return self

    def __exit__(
        self,
        _class: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        logging.getLogger("dcp_rs").removeHandler(self._warnings)
        self._listener.close()

    def _answer(self, request: Request) -> Answer:
        found = self._paths.get(request.path)
        return not_found(list(self._paths)) if found is None else found(request)

    def _livez(self, _request: Request) -> Answer:
        return _unless(self._health.why_not_alive())

    def _readyz(self, _request: Request) -> Answer:
        return _unless(self._health.why_not_ready())

    def _exported(self, request: Request) -> Answer:
        encode, content_type = self._exposition.choose_encoder(request.accept)
        is_long = parse_qs(request.query).get("vbuckets") == ["1"]
        return Answer(HTTPStatus.OK, encode(self._metrics[is_long]), content_type)

    def _status(self, _request: Request) -> Answer:
        health = self._health
        report, stats = health.last(), health.streams.stats()
        not_alive, not_ready = health.why_not_alive(), health.why_not_ready()
        found: dict[str, object] = {
            "bucket": health.bucket,
            "stream": health.name,
            "version": _dcp_rs.__version__,
            "live": not_alive is None,
            "ready": not_ready is None,
            "reason": not_alive or not_ready,
            "phase": "starting",
            "vbuckets": {name: getattr(stats, name) for name in _STATES},
            "connections": stats.connections,
            "reconnects": stats.reconnects,
            "last_commit": None,
            "events": dict(health.events),
            "errors": self._warnings.found(),
        }
        if report is not None:
            progress = report.progress
            found |= asdict(progress) | {"seconds_left": progress.seconds_left}
            ago = progress.seconds_since_commit
            found["last_commit"] = {
                "time": time.time() - ago if progress.commits else None,
                "seconds_ago": ago,
                "running_seconds": report.committing,
            }
            found["seconds_since_report"] = report.age
        text = json.dumps(found, indent=2) + "\n"
        return Answer(HTTPStatus.OK, text.encode(), "application/json")


def _unless(reason: str | None) -> Answer:
    if reason is None:
        return Answer(HTTPStatus.OK, b"ok\n")
    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n".encode())


def _registry(health: Health, warnings: _Warnings, *, vbuckets: bool) -> Any:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry, collector = CollectorRegistry(), PrometheusCollector()
    registry.register(warnings)
    collector._watched.add(  # noqa: SLF001 - the package's own
        Source(
            bucket=health.bucket,
            name=health.name,
            stream=health.streams,
            report=health.last,
            vbuckets=vbuckets,
        )
    )
    registry.register(collector)
    # Memory, processor time and open files of the process.
    ProcessCollector(registry=registry)
    return registry


class _Warnings(logging.Handler):
    """Keeps the warnings and errors that were logged last, each with how often it came.

    They hold no document and no secret, as the log does not.
    """

    def __init__(self, health: Health) -> None:
        super().__init__(logging.WARNING)
        self._health = health
        self._labels = health.bucket, health.name
        # Of every event, since the beginning: there are few.
        self._counts: dict[str, int] = {}
        self._found: OrderedDict[tuple[str, str], dict[str, object]] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        self._counts[event or "other"] = self._counts.get(event or "other", 0) + 1
        key = record.name, event or str(record.msg)
        before = self._found.pop(key, {})
        self._found[key] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "event": event,
            "message": record.getMessage(),
            "count": int(str(before.get("count", 0))) + 1,
        }
        while len(self._found) > _WARNINGS:
            self._found.popitem(last=False)

    def collect(self) -> Iterator[Any]:
        """Yields the metrics that count them, and what has happened to the streams."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "dcp_rs_warnings", "Warnings and errors that were logged",
            labels=["bucket", "stream", "event"],
        )  # fmt: skip
        for event, count in list(self._counts.items()):
            family.add_metric([*self._labels, event], count)
        yield family
        family = CounterMetricFamily(
            "dcp_rs_stream_events", "What has happened to vBuckets and connections",
            labels=["bucket", "stream", "kind"],
        )  # fmt: skip
        for kind, count in list(self._health.events.items()):
            family.add_metric([*self._labels, kind], count)
        yield family

    def found(self) -> list[dict[str, object]]:
        """Returns them, newest first."""
        self.acquire()
        try:
            return list(reversed(self._found.values()))
        finally:
            self.release()
