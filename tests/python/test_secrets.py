"""A password, and what SCRAM makes of it, are shown nowhere."""

import base64
import contextlib
import copy
import hashlib
import hmac
import logging
import pickle
import re
import traceback
from urllib.parse import quote

import pytest

import dcp_rs
from dcp_rs.exceptions import DcpError
from tap import Tap

PASSWORD = "canary 4b7d-0a92/pass+phrase"
USER = "canary-user"


def forms(secret):
    """How bytes may be written: as they are, escaped, in hexadecimal and in base64."""
    text = secret.decode("latin-1")
    yield from (text, repr(secret)[2:-1], quote(text), secret.hex(), secret.hex().upper())
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + secret)
        # The first and the last digits are those of the neighbours, too.
        yield encoded[(before * 8 + 5) // 6 : -4].decode()


def scram_material(tap):
    """What is made of the password in a login, and what was sent to prove it."""
    name = re.search(rb"SCRAM-SHA(\d+)n,,", tap.sent)[1].decode()
    algorithm = {"1": "sha1", "256": "sha256", "512": "sha512"}[name]
    salt, iterations = re.search(rb"r=[^,]+,s=([A-Za-z0-9+/=]+),i=(\d+)", tap.received).groups()
    salted = hashlib.pbkdf2_hmac(
        algorithm, PASSWORD.encode(), base64.b64decode(salt), int(iterations)
    )
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    server_key = hmac.digest(salted, b"Server Key", algorithm)
    proof = base64.b64decode(re.search(rb",p=([A-Za-z0-9+/=]+)", tap.sent)[1])
    return [salted, client_key, hashlib.new(algorithm, client_key).digest(), server_key, proof]


class Records(logging.Handler):
    def __init__(self):
        super().__init__(level=1)
        self.told = []

    def emit(self, record):
        self.told.append(f"{record.getMessage()} {record.__dict__}")


@pytest.fixture
def records():
    """Whatever is logged, at the finest level."""
    logger, handler = logging.getLogger("dcp_rs"), Records()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(1)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def shown(value):
    return [repr(value), str(value), f"{value}"]


def failures(tap, cluster):
    """What is said where a connection cannot be made."""
    given = {"bucket": "default", "username": USER, "password": PASSWORD, "connect_timeout": 2.0}
    string = f"couchbase://127.0.0.1:{tap.port}"
    for connection_string, options in (
        (string, {"password": PASSWORD + "!"}),
        (string, {"username": "nobody"}),
        (string, {"bucket": "none"}),
        (string, {"sasl_mechanisms": ["PLAIN"]}),
        ("couchbase://127.0.0.1:1", {}),
        (string.replace("://", "s://"), {}),
        (f"couchbase://{USER}:{quote(PASSWORD)}@127.0.0.1/default", {}),
        (f"{string}?password={quote(PASSWORD)}", {}),
        (string, {"tls_key": "none"}),
        (string, {"bucket": None}),
        (string, {"network": "nowhere"}),
    ):
        with contextlib.suppress(DcpError):
            try:
                dcp_rs.connect(connection_string, **given | options).close()
            except DcpError as error:
                yield from (*shown(error), "".join(traceback.format_exception(error)))
                yield repr(pickle.dumps(error))
                raise
    with contextlib.suppress(DcpError):
        cluster.set_password("")


def test_a_secret_is_found_however_it_is_written():
    secret = PASSWORD.encode()
    for before in (b"", b"\0", b"\0user\0", b"12345"):
        text = base64.b64encode(before + secret + b"\0 and more").decode()
        assert any(form in text for form in forms(secret)), before
    assert any(form in f"b'{PASSWORD}'" for form in forms(secret))


def test_a_password_and_what_scram_makes_of_it_are_shown_nowhere(records, tmp_path):
    data = tmp_path / "data"
    with dcp_rs.testing.EmbeddedCluster(
        vbuckets=2, username=USER, password=PASSWORD, data=data
    ) as cluster:
        tap = Tap(cluster)
        client = dcp_rs.connect(
            f"couchbase://127.0.0.1:{tap.port}", bucket="default", username=USER, password=PASSWORD
        )
        cluster.upsert("a", b"1")
        cluster.persist()
        store = dcp_rs.FileStore(tmp_path / "positions.json")
        stream = client.stream(start=store, batch=dcp_rs.BatchPolicy(linger=0.01))
        batch = next(stream)
        store.save(batch.checkpoint)
        cluster.kill(0)
        cluster.restart(0)
        cluster.upsert("a", b"2")
        next(stream)
        told = []
        for each in (
            client, client.options, copy.copy(client.options), cluster, stream, stream.stats(),
            stream.events(), stream.vbucket_stats(), batch, batch.checkpoint, store,
        ):  # fmt: skip
            told += shown(each)
        told += [repr(pickle.dumps(each)) for each in (batch.checkpoint, stream.checkpoint())]
        # Whoever pickles options wants to connect with them.
        assert PASSWORD.encode() in pickle.dumps(client.options)
        stream.close()
        client.close()
        told += failures(tap, cluster)
        tap.close()
    assert len(told) > 60, "failures were told"
    assert len(records.told) > 10, "things were logged"
    told += records.told
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    told += [path.read_bytes().decode("latin-1") for path in files]
    assert len(files) >= 3, "a checkpoint, its lock and the data"
    secrets = [PASSWORD.encode(), *scram_material(tap)]
    for secret in secrets:
        for form in forms(secret):
            assert len(form) >= 16
            found = [text for text in told if form in text]
            assert not found, (form, found[0][:2000])
