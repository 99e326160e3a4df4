"""Metrics of streams and replications for Prometheus and OpenTelemetry.

They read `dcp_rs.ChangeStream.stats`, or the last `dcp_rs.replication.Progress`, on demand, so they
cost nothing per change.

* `PrometheusCollector` needs `pip install "dcp-rs[prometheus]"`;
* `instrument` and `instrument_replication` need `pip install "dcp-rs[opentelemetry]"`.

Every series has the labels `bucket` and `stream`. `dcp_rs.replicate` exports the same by itself,
with `listen`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dcp_rs import _checks
from dcp_rs._figures import FIGURES, Figure, Report, Source
from dcp_rs._libraries import require
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError, ForkedProcessError
from dcp_rs.stream import ChangeStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    from dcp_rs._figures import Points
    from dcp_rs.replication.progress import Progress
else:
    Collector = object


class _Watched:
    """The streams and replications of one collector or meter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[Source] = []

    def add_stream(
        self, stream: ChangeStream, name: str, *, collections: bool, vbuckets: bool
    ) -> None:
        _checks.instance("stream", stream, ChangeStream, "a ChangeStream")
        self.add(
            Source(
                bucket=stream.bucket_name,
                name=name,
                stream=stream,
                collections=collections,
                vbuckets=vbuckets,
            )
        )

    def add_replication(self, client: Client, name: str) -> Callable[[Progress], None]:
        _checks.instance("client", client, Client, "a Client")
        reports = _Reports()
        self.add(Source(bucket=client.bucket_name, name=name, report=reports.last))
        return reports.take

    def add(self, source: Source) -> None:
        with self._lock:
            others = [other for other in self._sources if not other.is_closed]
            if source.report is not None:
                # The one before has ended, or nobody would begin another.
                others = [
                    each for each in others if each.labels != source.labels or each.report is None
                ]
            if any(other.labels == source.labels for other in others):
                bucket, name = source.labels
                raise ConfigError(
                    f"a stream {name!r} of the bucket {bucket!r} is already watched: give "
                    "each stream its own name",
                    option="name",
                )
            self._sources = [*others, source]

    def read(self, figure: Figure) -> Points:
        """Returns the points of a metric: the values of its labels, and its value."""
        with self._lock:
            sources = self._sources = [each for each in self._sources if not each.is_closed]
        for source in sources:
            try:
                points = list(figure.points(source))
            except ForkedProcessError:
                # A stream is watched only in the process that opened it.
                continue
            for labels, value in points:
                yield (*source.labels, *labels), value


class _Reports:
    """The last report of a replication."""

    def __init__(self) -> None:
        self._last: tuple[Progress, float] | None = None

    def take(self, progress: Progress) -> None:
        self._last = progress, time.monotonic()

    def last(self) -> Report | None:
        if self._last is None:
            return None
        progress, at = self._last
        return Report.of(progress, time.monotonic() - at)


class PrometheusCollector(Collector):
    """Exports streams and replications to `prometheus_client`. Register it once, and add to it.

        >>> from prometheus_client import CollectorRegistry
        >>> registry = CollectorRegistry()
        >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
        ...     _ = cluster.upsert("key", b"{}")
        ...     with client.stream(until="now") as stream:
        ...         registry.register(PrometheusCollector(stream, name="orders"))
        ...         rows = sum(batch.num_rows for batch in stream)
        ...         labels = {"bucket": "default", "stream": "orders"}
        ...         int(registry.get_sample_value("dcp_rs_records_total", labels))
        1

    Closed streams are left out.

    Args:
        stream: The first stream, as for `add`; optional.
        name: Its name.
        collections: Whether to export its lag by collection.
        vbuckets: Whether to export its lag and seqnos by vBucket: 1,024 series each.

    Raises:
        ImportError: `prometheus_client` is not installed.
        ConfigError: `prometheus_client` is too old; and the errors of `add`.
    """

    def __init__(
        self,
        stream: ChangeStream | None = None,
        *,
        name: str = "",
        collections: bool = False,
        vbuckets: bool = False,
    ) -> None:
        require("PrometheusCollector", "prometheus_client.core", "prometheus")
        self._watched = _Watched()
        if stream is not None:
            self.add(stream, name=name, collections=collections, vbuckets=vbuckets)

    def add(
        self,
        stream: ChangeStream,
        *,
        name: str = "",
        collections: bool = False,
        vbuckets: bool = False,
    ) -> None:
        """Adds another stream, with the options of the class.

        Raises:
            ConfigError: A stream of the same bucket already has this name.
        """
        self._watched.add_stream(stream, name, collections=collections, vbuckets=vbuckets)

    def add_replication(self, client: Client, *, name: str = "") -> Callable[[Progress], None]:
        """Adds a replication, in place of an earlier one with the same name.

            >>> import tempfile
            >>> from prometheus_client import CollectorRegistry
            >>> registry, collector = CollectorRegistry(), PrometheusCollector()
            >>> registry.register(collector)
            >>> with EmbeddedCluster() as cluster, cluster.connect() as client:
            ...     _ = cluster.upsert("key", {})
            ...     update = collector.add_replication(client, name="travel")
            ...     target = f"duckdb://{tempfile.mkdtemp()}/travel.duckdb"
            ...     _ = dcp_rs.replicate(client, target, once=True, on_progress=update)
            ...     labels = {"bucket": "default", "stream": "travel"}
            ...     int(registry.get_sample_value("dcp_rs_committed_records_total", labels))
            1

        Args:
            client: Client of the bucket.
            name: Name of the replication.

        Returns:
            What to pass to `dcp_rs.replicate` as `on_progress`.

        Raises:
            ConfigError: A stream of the same bucket has this name.
        """
        return self._watched.add_replication(client, name)

    def describe(self) -> Iterable[Metric]:
        """Returns the metrics without values, so that registering reads no stream."""
        return [_family(figure) for figure in FIGURES]

    def collect(self) -> Iterable[Metric]:
        """Reads the metrics; called by Prometheus's client."""
        for figure in FIGURES:
            family = _family(figure)
            for labels, value in self._watched.read(figure):
                family.add_metric(labels, value)
            if family.samples:
                yield family


def _family(figure: Figure) -> CounterMetricFamily | GaugeMetricFamily:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
    )

    family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    return family(figure.prometheus, figure.description, labels=figure.labels)


_METERS: WeakKeyDictionary[Meter, _Watched] = WeakKeyDictionary()
_METERS_LOCK = threading.Lock()


def instrument(
    stream: ChangeStream,
    meter: Meter | None = None,
    *,
    name: str = "",
    collections: bool = False,
    vbuckets: bool = False,
) -> None:
    """Exports a stream to OpenTelemetry, with observable instruments of a meter.

    If you call it for several streams, all share the same instruments. Closed streams are left out.

    Args:
        stream: The stream.
        meter: The meter; by default, the global provider's meter `dcp_rs`.
        name: Name of the stream, in the attribute `stream`.
        collections: Whether to export its lag by collection.
        vbuckets: Whether to export its lag and seqnos by vBucket: 1,024 series each.

    Raises:
        ImportError: `opentelemetry-api` is not installed.
        ConfigError: It is too old, or a stream of the same bucket already has this name.
    """
    watched = _watched("instrument", meter)
    watched.add_stream(stream, name, collections=collections, vbuckets=vbuckets)


def instrument_replication(
    client: Client, meter: Meter | None = None, *, name: str = ""
) -> Callable[[Progress], None]:
    """Exports a replication to OpenTelemetry, in place of an earlier one with the same name.

    Args:
        client: Client of the bucket.
        meter: The meter, as for `instrument`.
        name: Name of the replication, in the attribute `stream`.

    Returns:
        What to pass to `dcp_rs.replicate` as `on_progress`.

    Raises:
        ImportError: `opentelemetry-api` is not installed.
        ConfigError: It is too old, or a stream of the same bucket has this name.
    """
    return _watched("instrument_replication", meter).add_replication(client, name)


def _watched(what: str, meter: Meter | None) -> _Watched:
    """Returns what a meter exports."""
    metrics = require(what, "opentelemetry.metrics", "opentelemetry")
    meter = metrics.get_meter("dcp_rs") if meter is None else meter
    with _METERS_LOCK:
        if meter in _METERS:
            return _METERS[meter]
        watched = _METERS[meter] = _Watched()
    for figure in FIGURES:
        make = (
            meter.create_observable_counter
            if figure.kind == "counter"
            else meter.create_observable_gauge
        )
        make(
            figure.opentelemetry,
            callbacks=[_callback(watched, figure)],
            unit=figure.unit,
            description=figure.description,
        )
    return watched


def _callback(
    watched: _Watched, figure: Figure
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    names = figure.labels

    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        for labels, value in watched.read(figure):
            yield Observation(value, dict(zip(names, labels, strict=True)))

    return observe
