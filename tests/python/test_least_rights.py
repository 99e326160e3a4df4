"""What users can read who have the role *Data DCP Reader*, in the bucket or a part of it."""

import pickle

import pytest

import dcp_rs
from dcp_rs import exceptions
from dcp_rs.testing import User
from reading import rows_of

USERS = [
    User(username="reader", password="a"),
    User(username="of_scope", password="b", reads=["inventory"]),
    User(username="of_collection", password="c", reads=["inventory.hotels"]),
    User(username="nobody", password="d", reads=[]),
]


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(nodes=2, vbuckets=16, users=USERS) as running:
        running.create_scope("inventory")
        for name in ("hotels", "routes"):
            running.create_collection(f"inventory.{name}")
            running.upsert(name, b"1", collection=f"inventory.{name}")
        running.upsert("outside", b"1")
        yield running


@pytest.fixture
def read(cluster):
    """Reads as a user; gives the keys."""
    passwords = {user.username: user.password for user in USERS}

    def keys(username, **options):
        with (
            cluster.connect(
                username=username, password=passwords[username], retry_timeout=3.0
            ) as client,
            client.stream(until="now", **options) as stream,
        ):
            return sorted(row["key"] for row in rows_of(stream))

    return keys


def test_users_read_what_their_role_covers(read):
    assert read("reader") == ["hotels", "outside", "routes"]
    assert read("of_scope", collections="inventory.*") == ["hotels", "routes"]
    assert read("of_scope", collections=["inventory.hotels"]) == ["hotels"]
    assert read("of_collection", collections=["inventory.hotels"]) == ["hotels"]


@pytest.mark.parametrize(
    ("username", "options"),
    [
        ("of_scope", {}),
        ("of_scope", {"collections": "_default.*"}),
        ("of_collection", {"collections": "inventory.*"}),
        ("of_collection", {"collections": ["inventory.hotels", "inventory.routes"]}),
        ("nobody", {"collections": ["inventory.hotels"]}),
    ],
)
def test_what_it_does_not_cover_is_refused_with_the_role_to_grant(read, username, options):
    with pytest.raises(exceptions.AccessDeniedError) as error:
        read(username, **options)
    said = str(error.value)
    assert f"user '{username}' lacks rights in bucket 'default'" in said
    assert said.count("data_dcp_reader") == 1, said


def test_each_user_has_a_password_of_its_own(cluster):
    for mechanism in (None, ["SCRAM-SHA1"], ["SCRAM-SHA512"]):
        cluster.connect(username="reader", password="a", sasl_mechanisms=mechanism).close()
        for username, password in (("reader", "b"), ("Administrator", "a"), ("reade", "a")):
            with pytest.raises(exceptions.AuthenticationError):
                cluster.connect(username=username, password=password, sasl_mechanisms=mechanism)


@pytest.mark.shows_password("whoever pickles options wants to connect with them")
def test_the_suite_itself_logs_in_as_a_reader():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=1) as cluster, cluster.connect() as client:
        assert client.options.username == "reader"
        assert pickle.loads(pickle.dumps(client.options)).username == "reader"


@pytest.mark.parametrize(
    ("users", "named"),
    [
        ("reader", "users"),
        ([{"username": "a"}], "users"),
        ([User(username="Administrator", password="a")], "twice"),
        ([User(username="", password="a")], "empty"),
    ],
)
def test_users_that_cannot_be_are_refused(users, named):
    with pytest.raises((exceptions.ConfigError, TypeError), match=named):
        dcp_rs.testing.EmbeddedCluster(users=users)
