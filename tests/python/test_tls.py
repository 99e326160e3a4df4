"""The embedded cluster over TLS and HTTP."""

import base64
import json
import ssl
import urllib.request
from dataclasses import replace

import pytest

import dcp_rs
from dcp_rs import exceptions


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16, tls=True) as running:
        yield running


@pytest.fixture
def ca(cluster, tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text(cluster.ca_pem)
    return path


def ask(url, **options):
    pair = base64.b64encode(b"Administrator:canary-8f1c2e").decode()
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {pair}"})
    with urllib.request.urlopen(request, timeout=10, **options) as answer:
        return json.load(answer)


def connect(cluster, ca):
    return dcp_rs.connect(
        cluster.tls_connection_string,
        username="Administrator",
        password="canary-8f1c2e",
        bucket="default",
        tls_ca=ca,
    )


def test_changes_are_read_over_tls(cluster, ca):
    for n in range(100):
        cluster.upsert(f"key_{n}", b"1")
    assert cluster.tls_connection_string.startswith("couchbases://")
    with connect(cluster, ca) as client, client.stream(until="now") as stream:
        assert stream.read_all().num_rows == 100


def test_plain_is_for_verified_servers_and_other_mechanisms_can_be_named(cluster, ca):
    options = dcp_rs.ConnectionOptions(
        connection_string=cluster.tls_connection_string,
        username="Administrator",
        password="canary-8f1c2e",
        bucket="default",
        tls_ca=ca,
    )
    # Users of LDAP can prove nothing, which PLAIN does not ask for.
    cluster.set_faults(
        [{"condition": {"opcode": "SASL_STEP"}, "reaction": {"answer": {"status": "AUTH_ERROR"}}}]
    )
    dcp_rs.connect(options).close()
    scram = replace(options, sasl_mechanisms=["SCRAM-SHA512"])
    with pytest.raises(exceptions.AuthenticationError):
        dcp_rs.connect(scram)
    cluster.set_faults([])
    dcp_rs.connect(scram).close()
    with pytest.raises(exceptions.ConfigError, match="PLAIN"):
        dcp_rs.connect(
            cluster.connection_string,
            username="Administrator",
            password="canary-8f1c2e",
            bucket="default",
            sasl_mechanisms=["PLAIN"],
        )
    for wrong in ("PLAIN", ["plain"], [1], []):
        with pytest.raises(exceptions.ConfigError, match="sasl_mechanisms"):
            dcp_rs.connect(replace(options, sasl_mechanisms=wrong))


def test_a_cluster_with_another_authority_is_not_trusted(cluster, tmp_path):
    with dcp_rs.testing.EmbeddedCluster(tls=True) as other:
        path = tmp_path / "other.pem"
        path.write_text(other.ca_pem)
    with pytest.raises(exceptions.DcpError, match="authority"):
        connect(cluster, path)


def test_http_answers_with_and_without_tls(cluster, ca):
    trusting = ssl.create_default_context(cafile=ca)
    for url in cluster.management_urls:
        assert ask(f"{url}/pools/default/b/default")["uuid"] == cluster.bucket_uuid
    for url in cluster.tls_management_urls:
        assert ask(f"{url}/whoami", context=trusting)["id"] == "Administrator"


def test_without_tls_there_is_nothing_of_it():
    with dcp_rs.testing.EmbeddedCluster() as cluster:
        assert cluster.ca_pem is None
        assert cluster.tls_connection_string is None
        assert cluster.tls_management_urls == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tls": 1}, "tls: must be True or False"),
        ({"tls_port": 11207}, "tls_port: needs TLS, which is off"),
        ({"tls": True, "tls_key": "key.pem"}, "tls_certificate, tls_key: give both or neither"),
        (
            {"tls": True, "tls_client_required": True},
            "tls_client_required, tls_client_ca: name the authority",
        ),
        ({"tls": True, "tls_client_ca": "/nowhere.pem"}, "tls_client_ca: /nowhere.pem could not"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options, named):
    with pytest.raises(exceptions.ConfigError, match=named):
        dcp_rs.testing.EmbeddedCluster(**options)
