"""Figures of streams for Prometheus and OpenTelemetry."""

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

import dcp_rs
from dcp_rs import metrics
from dcp_rs.exceptions import ConfigError
from lag import until

_LABELS = {"bucket": "default", "stream": "orders"}


def points_of(reader):
    """Gives what OpenTelemetry exports: values by name and attributes."""
    data = reader.get_metrics_data()
    return {
        (metric.name, *(value for key, value in sorted(point.attributes.items()))): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_prometheus_shows_what_a_stream_does(client, fill):
    fill(50)
    registry = CollectorRegistry()
    with client.stream(batch=dcp_rs.BatchPolicy(max_rows=7, linger=0.0)) as stream:
        registry.register(metrics.PrometheusCollector(stream, name="orders", collections=True))
        rows = next(stream).num_rows
        until(lambda: stream.stats().lag is not None)

        def value(name, **labels):
            return registry.get_sample_value(name, _LABELS | labels)

        assert value("dcp_rs_records_total") == rows
        assert value("dcp_rs_batches_total") == 1
        assert value("dcp_rs_lag") == 50 - rows
        assert 0 < value("dcp_rs_lag_max") <= 50 - rows
        assert value("dcp_rs_reconnects_total") == 0
        assert value("dcp_rs_connections") == 2
        assert value("dcp_rs_buffered_bytes") > 0
        assert value("dcp_rs_vbuckets", state="streaming") == 16
        assert value("dcp_rs_vbucket_lag", vbucket="0") is None, "not asked for"
        collection = {"collection": "_default._default"}
        until(lambda: value("dcp_rs_collection_lag", **collection) == 50 - rows)
        while rows < 50:
            rows += next(stream).num_rows
        assert value("dcp_rs_records_total") == 50
        assert value("dcp_rs_lag") == value("dcp_rs_lag_max") == 0


def test_several_streams_are_shown_by_one_collector_until_they_are_closed(client, fill):
    fill(20)
    registry, collector = CollectorRegistry(auto_describe=True), metrics.PrometheusCollector()
    registry.register(collector)
    assert generate_latest(registry) == b""
    with client.stream(vbuckets=[0, 1]) as one, client.stream(vbuckets=[2]) as other:
        collector.add(one, name="one", vbuckets=True)
        collector.add(other, name="other")
        with pytest.raises(ConfigError, match="'one' of the bucket 'default' is already watched"):
            collector.add(other, name="one")
        page = generate_latest(registry).decode()
        assert page.count("# TYPE dcp_rs_records_total counter") == 1
        for vbucket in (0, 1):
            labels = f'{{bucket="default",stream="one",vbucket="{vbucket}"}}'
            assert f"dcp_rs_vbucket_seqno{labels} " in page
        assert 'dcp_rs_vbucket_seqno{bucket="default",stream="other"' not in page
    assert generate_latest(registry) == b"", "closed streams are not shown, and nothing is raised"
    with client.stream(vbuckets=[0]) as again:
        collector.add(again, name="one")
        assert b'stream="one"' in generate_latest(registry)


def test_documents_that_do_not_fit_are_shown(cluster, client):
    for number, value in enumerate((b"[]", b"no JSON", b'{"n": "x"}', b'{"n": 1}')):
        cluster.upsert(f"k{number}", value)
    registry = CollectorRegistry()
    with client.stream(until="now", document_schema="n INT") as stream:
        registry.register(metrics.PrometheusCollector(stream, name="orders"))
        list(stream)
        names = ("dcp_rs_malformed_documents_total", "dcp_rs_partly_malformed_documents_total")
        assert [registry.get_sample_value(name, _LABELS) for name in names] == [2, 1]


def test_opentelemetry_shows_what_streams_do(client, fill):
    fill(30)
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    with client.stream(until="now") as one, client.stream(vbuckets=[3]) as other:
        metrics.instrument(one, meter, name="one", collections=True)
        metrics.instrument(other, meter, name="other", vbuckets=True)
        rows = sum(batch.num_rows for batch in one)
        points = points_of(reader)
        assert points["dcp_rs.records", "default", "one"] == rows == 30
        assert points["dcp_rs.records", "default", "other"] == 0
        assert points["dcp_rs.lag", "default", "one"] == 0
        assert points["dcp_rs.vbuckets", "default", "complete", "one"] == 16
        assert points["dcp_rs.vbucket.seqno", "default", "other", "3"] == 0
        assert points["dcp_rs.reconnects", "default", "one"] == 0
        with pytest.raises(ConfigError, match="already watched"):
            metrics.instrument(other, meter, name="one")
    reader.collect()


def test_metrics_are_of_streams(client):
    for wrong in (client, "stream"):
        with pytest.raises(ConfigError, match="stream: must be a ChangeStream"):
            metrics.PrometheusCollector().add(wrong)
