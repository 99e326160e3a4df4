"""Metrics of streams for Prometheus and OpenTelemetry.

Both read `dcp_rs.ChangeStream.stats` on demand, so they cost nothing per change.

* `PrometheusCollector` needs `pip install "dcp-rs[prometheus]"`;
* `instrument` needs `pip install "dcp-rs[opentelemetry]"`.

Every series has the labels `bucket` and `stream`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from dcp_rs import _checks
from dcp_rs._libraries import require
from dcp_rs.exceptions import ConfigError, ForkedProcessError
from dcp_rs.stream import ChangeStream, StreamStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    _Points = Iterator[tuple[tuple[str, ...], float]]
else:
    Collector = object

_STATES = ("opening", "streaming", "backing_off", "complete", "failed")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A watched stream."""

    stream: ChangeStream
    name: str
    collections: bool
    vbuckets: bool

    @property
    def labels(self) -> tuple[str, str]:
        return (self.stream.bucket_name, self.name)


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """A metric: its names, and how to read it."""

    prometheus: str
    opentelemetry: str
    kind: Literal["counter", "gauge"]
    unit: str
    description: str
    read: Callable[[_Source], _Points]
    label: str | None = None


def _of_stats(value: Callable[[StreamStats], float | None]) -> Callable[[_Source], _Points]:
    def read(source: _Source) -> _Points:
        # Unknown values are left out, instead of 0.
        if (known := value(source.stream.stats())) is not None:
            yield (), known

    return read


def _states(source: _Source) -> _Points:
    stats = source.stream.stats()
    for state in _STATES:
        yield (state,), getattr(stats, state)


def _collections(source: _Source) -> _Points:
    if source.collections:
        for name, lag in source.stream.collection_lag().items():
            if lag is not None:
                yield (name,), lag


def _vbuckets(attribute: str) -> Callable[[_Source], _Points]:
    def read(source: _Source) -> _Points:
        if source.vbuckets:
            for each in source.stream.vbucket_stats():
                if (value := getattr(each, attribute)) is not None:
                    yield (str(each.vbucket),), value

    return read


_FIGURES = (
    _Figure(
        prometheus="dcp_rs_records",
        opentelemetry="dcp_rs.records",
        kind="counter",
        unit="{record}",
        description="Changes taken by the application",
        read=_of_stats(lambda stats: stats.rows),
    ),
    _Figure(
        prometheus="dcp_rs_batches",
        opentelemetry="dcp_rs.batches",
        kind="counter",
        unit="{batch}",
        description="Batches taken by the application",
        read=_of_stats(lambda stats: stats.batches),
    ),
    _Figure(
        prometheus="dcp_rs_malformed_documents",
        opentelemetry="dcp_rs.documents.malformed",
        kind="counter",
        unit="{document}",
        description="Malformed documents, of which all columns are null",
        read=_of_stats(lambda stats: stats.malformed),
    ),
    _Figure(
        prometheus="dcp_rs_partly_malformed_documents",
        opentelemetry="dcp_rs.documents.partly_malformed",
        kind="counter",
        unit="{document}",
        description="Documents of which some values do not fit their columns and are null",
        read=_of_stats(lambda stats: stats.partly_malformed),
    ),
    _Figure(
        prometheus="dcp_rs_lag",
        opentelemetry="dcp_rs.lag",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the server, all vBuckets together",
        read=_of_stats(lambda stats: stats.lag),
    ),
    _Figure(
        prometheus="dcp_rs_lag_max",
        opentelemetry="dcp_rs.lag.max",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the server in the vBucket that is furthest behind",
        read=_of_stats(lambda stats: stats.max_lag),
    ),
    _Figure(
        prometheus="dcp_rs_collection_lag",
        opentelemetry="dcp_rs.collection.lag",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the newest change of a collection",
        read=_collections,
        label="collection",
    ),
    _Figure(
        prometheus="dcp_rs_buffered_bytes",
        opentelemetry="dcp_rs.buffered",
        kind="gauge",
        unit="By",
        description="Bytes received and not yet taken by the application",
        read=_of_stats(lambda stats: stats.buffered_bytes),
    ),
    _Figure(
        prometheus="dcp_rs_connections",
        opentelemetry="dcp_rs.connections",
        kind="gauge",
        unit="{connection}",
        description="Connections in use",
        read=_of_stats(lambda stats: stats.connections),
    ),
    _Figure(
        prometheus="dcp_rs_reconnects",
        opentelemetry="dcp_rs.reconnects",
        kind="counter",
        unit="{outage}",
        description="Connections lost, and nodes that could not be reached",
        read=_of_stats(lambda stats: stats.reconnects),
    ),
    _Figure(
        prometheus="dcp_rs_vbuckets",
        opentelemetry="dcp_rs.vbuckets",
        kind="gauge",
        unit="{vbucket}",
        description="vBuckets by what they are doing",
        read=_states,
        label="state",
    ),
    _Figure(
        prometheus="dcp_rs_disconnected_vbuckets",
        opentelemetry="dcp_rs.vbuckets.disconnected",
        kind="gauge",
        unit="{vbucket}",
        description="vBuckets that have not been streaming for three seconds",
        read=_of_stats(lambda stats: stats.disconnected),
    ),
    _Figure(
        prometheus="dcp_rs_diverged_vbuckets",
        opentelemetry="dcp_rs.vbuckets.diverged",
        kind="gauge",
        unit="{vbucket}",
        description="vBuckets whose changes wait because copies are on different branches",
        read=_of_stats(lambda stats: stats.diverged),
    ),
    _Figure(
        prometheus="dcp_rs_unpersisted_records",
        opentelemetry="dcp_rs.unpersisted.records",
        kind="gauge",
        unit="{record}",
        description="Changes that wait for the disks of all copies",
        read=_of_stats(lambda stats: stats.unpersisted_rows),
    ),
    _Figure(
        prometheus="dcp_rs_unpersisted_seconds",
        opentelemetry="dcp_rs.unpersisted.age",
        kind="gauge",
        unit="s",
        description="Time for which the oldest of them has waited",
        read=_of_stats(lambda stats: stats.unpersisted_seconds),
    ),
    _Figure(
        prometheus="dcp_rs_vbucket_lag",
        opentelemetry="dcp_rs.vbucket.lag",
        kind="gauge",
        unit="{seqno}",
        description="Seqnos behind the server",
        read=_vbuckets("lag"),
        label="vbucket",
    ),
    _Figure(
        prometheus="dcp_rs_vbucket_seqno",
        opentelemetry="dcp_rs.vbucket.seqno",
        kind="gauge",
        unit="{seqno}",
        description="Last seqno taken by the application",
        read=_vbuckets("seqno"),
        label="vbucket",
    ),
    _Figure(
        prometheus="dcp_rs_vbucket_high_seqno",
        opentelemetry="dcp_rs.vbucket.high_seqno",
        kind="gauge",
        unit="{seqno}",
        description="Highest seqno of the server",
        read=_vbuckets("high_seqno"),
        label="vbucket",
    ),
)


class _Watched:
    """The streams of one collector or meter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[_Source] = []

    def add(self, source: _Source) -> None:
        _checks.instance("stream", source.stream, ChangeStream, "a ChangeStream")
        with self._lock:
            self._forget_closed()
            if any(other.labels == source.labels for other in self._sources):
                bucket, name = source.labels
                raise ConfigError(
                    f"a stream {name!r} of the bucket {bucket!r} is already watched: give "
                    "each stream its own name",
                    option="name",
                )
            self._sources.append(source)

    def read(self, figure: _Figure) -> _Points:
        """Returns the points of a metric: the values of its labels, and its value."""
        with self._lock:
            self._forget_closed()
            sources = list(self._sources)
        for source in sources:
            try:
                points = list(figure.read(source))
            except ForkedProcessError:
                # A stream is watched only in the process that opened it.
                continue
            for labels, value in points:
                yield (*source.labels, *labels), value

    def _forget_closed(self) -> None:
        self._sources = [source for source in self._sources if not source.stream.is_closed]


def _names(figure: _Figure) -> list[str]:
    return ["bucket", "stream", *([figure.label] if figure.label else [])]


class PrometheusCollector(Collector):
    """Exports streams to `prometheus_client`. Register it once, and add streams to it.

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
        self._watched.add(
            _Source(stream=stream, name=name, collections=collections, vbuckets=vbuckets)
        )

    def describe(self) -> Iterable[Metric]:
        """Returns the metrics without values, so that registering reads no stream."""
        return [_family(figure) for figure in _FIGURES]

    def collect(self) -> Iterable[Metric]:
        """Reads the metrics; called by Prometheus's client."""
        for figure in _FIGURES:
            family = _family(figure)
            for labels, value in self._watched.read(figure):
                family.add_metric(labels, value)
            if family.samples:
                yield family


def _family(figure: _Figure) -> CounterMetricFamily | GaugeMetricFamily:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
    )

    family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    return family(figure.prometheus, figure.description, labels=_names(figure))


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
    metrics = require("instrument", "opentelemetry.metrics", "opentelemetry")
    source = _Source(stream=stream, name=name, collections=collections, vbuckets=vbuckets)
    meter = metrics.get_meter("dcp_rs") if meter is None else meter
    with _METERS_LOCK:
        watched = _METERS.get(meter)
        if watched is not None:
            return watched.add(source)
        watched = _Watched()
        watched.add(source)
        _METERS[meter] = watched
    for figure in _FIGURES:
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
    return None


def _callback(
    watched: _Watched, figure: _Figure
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    names = _names(figure)

    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        for labels, value in watched.read(figure):
            yield Observation(value, dict(zip(names, labels, strict=True)))

    return observe
