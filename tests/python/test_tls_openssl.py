"""`couchbases://` with OpenSSL on the other end, and the private keys that OpenSSL makes."""

import pickle
import re
import shutil
import socket
import subprocess
import time

import pytest

import dcp_rs
from dcp_rs import exceptions
from reading import rows_of


def openssl(*arguments, folder):
    done = subprocess.run(
        ["openssl", *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class Authority:
    """A certificate authority of OpenSSL's, and what it signs."""

    def __init__(self, folder):
        self.folder, self.ca = folder, folder / "ca.pem"
        folder.mkdir(parents=True, exist_ok=True)
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc",
            "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Test authority", "-days", "2",
            folder=folder,
        )  # fmt: skip

    def sign(self, name, *, subject="node", names="IP:127.0.0.1,IP:127.0.0.2", days=2):
        """Gives the files of a certificate and its key."""
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={names}\n")
        openssl(
            "req", "-newkey", "rsa:2048", "-noenc", "-keyout", key, "-out", f"{name}.csr",
            "-subj", f"/CN={subject}", folder=self.folder,
        )  # fmt: skip
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", days, "-extfile", f"{name}.ext", "-out", certificate,
            folder=self.folder,
        )  # fmt: skip
        return certificate, key


def free_port(host="127.0.0.1"):
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def wait_until_open(process, host, port):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended by itself"
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((host, port)) == 0:
                return
        time.sleep(0.02)
    pytest.fail("it does not listen")


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """An authority that has signed certificates for the nodes and for the user."""
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.node = made.sign("node")
    made.user = made.sign("user", subject="Administrator")
    return made


@pytest.fixture
def start_process(tmp_path):
    """Starts programs that listen, and ends them."""
    started = []

    def start(command, host, port):
        with (tmp_path / f"process-{len(started)}.log").open("wb") as log:
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        started.append(process)
        wait_until_open(process, host, port)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def s_server(start_process, authority):
    """Starts `openssl s_server` with a certificate; gives where it listens."""

    def start(certificate, *arguments):
        port = free_port()
        chain, key = certificate
        start_process(
            ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-cert", chain, "-key", key,
             "-CAfile", authority.ca, "-quiet", *arguments],
            "127.0.0.1", port,
        )  # fmt: skip
        return f"couchbases://127.0.0.1:{port}"

    return start


@pytest.fixture
def stunnel(start_process, tmp_path):
    """Starts stunnel with services, each given by where it listens, where to, and its settings."""
    program = shutil.which("stunnel") or shutil.which("stunnel4")
    if program is None:
        pytest.fail("no stunnel: scripts/require.sh stunnel installs it")

    def start(services):
        lines = ["foreground = yes", "pid =", "debug = 4"]
        for index, (listen, to, settings) in enumerate(services):
            lines += [f"[service-{index}]", f"accept = {listen}", f"connect = {to}", *settings]
        configuration = tmp_path / "stunnel.conf"
        configuration.write_text("\n".join(lines) + "\n")
        host, _, port = services[0][0].rpartition(":")
        start_process([program, configuration], host, int(port))

    return start


def connect(address, ca, **options):
    given = {"username": "Administrator", "password": "canary-8f1c2e"}
    if "tls_certificate" in options:
        given = {}
    options = {"connect_timeout": 5.0} | given | options
    return dcp_rs.connect(address, bucket="default", tls_ca=ca, **options)


def pem(pair):
    return [f"cert = {pair[0]}", f"key = {pair[1]}"]


# ----- whole streams -----


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
@pytest.mark.parametrize("is_certified", [False, True])
def test_streams_run_through_stunnel(stunnel, authority, version, is_certified):
    # The nodes say that they are also reached at another address, which is that of stunnel: its
    # certificate is not of the authority that the cluster made for itself.
    options = {"tls_client_ca": authority.ca} if is_certified else {}
    with dcp_rs.testing.EmbeddedCluster(
        nodes=2, vbuckets=16, tls=True, alternate_host="127.0.0.2", **options
    ) as cluster:
        ports = re.findall(r":(\d+)", cluster.tls_connection_string)
        behind = re.findall(r":(\d+)", cluster.connection_string)
        accepts = [f"sslVersion = {version}", *pem(authority.node)]
        services, given = [], {}
        if is_certified:
            # stunnel demands the certificate of the client, and has one of its own for the nodes.
            accepts += [f"CAfile = {authority.ca}", "verifyChain = yes", "requireCert = yes"]
            behind = [free_port() for _ in ports]
            services = [
                (f"127.0.0.1:{middle}", f"127.0.0.1:{port}", ["client = yes", *pem(authority.user)])
                for middle, port in zip(behind, ports, strict=True)
            ]
            given = dict(zip(("tls_certificate", "tls_key"), authority.user, strict=True))
        fronts = [f"127.0.0.2:{port}" for port in ports]
        services += [
            (front, f"127.0.0.1:{to}", accepts) for front, to in zip(fronts, behind, strict=True)
        ]
        stunnel(services)
        address = "couchbases://" + ",".join(fronts)
        documents = {f"key_{n}": b'"%s"' % (b"x" * 5000) for n in range(200)}
        for key, value in documents.items():
            cluster.upsert(key, value)
        if is_certified:
            refused(address, authority.ca, "wants a client certificate")
        with connect(address, authority.ca, **given) as client:
            assert sorted(client.vbuckets_by_node()) == sorted(fronts)
            with client.stream(until="now") as stream:
                rows = rows_of(stream)
    assert {row["key"]: row["value"] for row in rows} == documents


# ----- handshakes -----


def refused(address, ca, says, **options):
    with pytest.raises(exceptions.ConnectError) as error:
        connect(address, ca, **options)
    assert error.value.code == "tls", error.value
    assert re.search(says, str(error.value)), error.value


@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
def test_certificates_that_do_not_fit_are_refused_with_what_to_change(
    s_server, authority, tmp_path, version
):  # fmt: skip
    elsewhere = authority.sign("elsewhere", names="DNS:elsewhere.example")
    refused(s_server(elsewhere, version), authority.ca, "another host name")
    expired = authority.sign("expired", days=-1)
    refused(s_server(expired, version), authority.ca, "not valid now.*clock")
    stranger = Authority(tmp_path / "stranger")
    refused(s_server(authority.node, version), stranger.ca, "as the one to trust")


@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
def test_a_server_that_demands_a_client_certificate_is_shown_one(
    s_server, authority, tmp_path, version
):  # fmt: skip
    address = s_server(authority.node, version, "-Verify", "1", "-verify_return_error")
    refused(address, authority.ca, "wants a client certificate")
    chain, key = Authority(tmp_path / "stranger").sign("client")
    pair = {"tls_certificate": chain, "tls_key": key}
    refused(address, authority.ca, "trusts the one given", **pair)
    chain, key = authority.user
    with pytest.raises(exceptions.DcpError) as error:
        connect(address, authority.ca, tls_certificate=chain, tls_key=key, connect_timeout=0.5)
    # The handshake is over, and `s_server` is no data service.
    assert error.value.code != "tls", error.value


def test_a_server_of_tls_1_1_is_told_what_to_take(s_server, authority):
    address = s_server(authority.node, "-tls1_1", "-cipher", "DEFAULT:@SECLEVEL=0")
    refused(address, authority.ca, r"neither TLS 1\.2 nor 1\.3.*tlsMinVersion")


# ----- encrypted private keys -----

PASSPHRASE = "a phrase nobody shows"


@pytest.fixture
def certified(authority):
    """A cluster whose clients show certificates."""
    with dcp_rs.testing.EmbeddedCluster(vbuckets=4, tls=True, tls_client_ca=authority.ca) as made:

        def attempt(key, **options):
            return dcp_rs.connect(
                made.tls_connection_string, bucket="default", tls_ca=made.ca_file,
                tls_certificate=authority.user[0], tls_key=key, **options,
            )  # fmt: skip

        yield attempt


@pytest.mark.parametrize(
    "how",
    [
        ["-v2", "aes-256-cbc"],
        ["-v2", "aes-128-cbc", "-v2prf", "hmacWithSHA512"],
        ["-scrypt"],
    ],
)
def test_an_encrypted_private_key_needs_its_passphrase(certified, authority, tmp_path, how):
    key = tmp_path / "encrypted.key"
    openssl(
        "pkcs8", "-topk8", *how, "-in", authority.user[1], "-out", key,
        "-passout", f"pass:{PASSPHRASE}", folder=tmp_path,
    )  # fmt: skip
    with certified(key, tls_key_password=PASSPHRASE) as client:
        assert PASSPHRASE not in repr(client.options)
        assert pickle.loads(pickle.dumps(client.options)) == client.options
        assert client.num_vbuckets == 4
    # As PKCS#12 tools write it, with attributes in front.
    key.write_text("Bag Attributes\n    friendlyName: client\n" + key.read_text())
    certified(key, tls_key_password=PASSPHRASE).close()
    with pytest.raises(exceptions.ConnectError, match="give its passphrase") as error:
        certified(key)
    assert "encrypted" in str(error.value)
    with pytest.raises(exceptions.ConnectError, match="check its passphrase") as error:
        certified(key, tls_key_password=PASSPHRASE + "?")
    assert PASSPHRASE not in repr(error.value)
    key.write_text(key.read_text()[:400])
    with pytest.raises(exceptions.ConnectError, match="damaged"):
        certified(key, tls_key_password=PASSPHRASE)


def test_a_key_in_an_old_encryption_says_how_to_convert_it(certified, authority, tmp_path):
    traditional = tmp_path / "traditional.key"
    openssl(
        "rsa", "-traditional", "-aes128", "-in", authority.user[1], "-out", traditional,
        "-passout", f"pass:{PASSPHRASE}", folder=tmp_path,
    )  # fmt: skip
    weak = tmp_path / "weak.key"
    openssl(
        "pkcs8", "-topk8", "-v2", "des3", "-in", authority.user[1], "-out", weak,
        "-passout", f"pass:{PASSPHRASE}", folder=tmp_path,
    )  # fmt: skip
    for key in (traditional, weak):
        with pytest.raises(exceptions.ConnectError, match="openssl pkcs8 -topk8"):
            certified(key, tls_key_password=PASSPHRASE)


def test_a_passphrase_without_a_key_and_wrong_srv_targets_are_refused():
    given = {"username": "u", "password": "p", "bucket": "b"}
    with pytest.raises(exceptions.ConfigError, match="tls_key_password: needs"):
        dcp_rs.connect("couchbases://h", tls_key_password="x", **given)
    with pytest.raises(exceptions.ConfigError, match="same_domain"):
        dcp_rs.connect("couchbases://h", srv_targets="all", **given)
