"""Options, as text from Spark or as Python values."""

import ast
import pickle
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest

import dcp_rs.spark
from dcp_rs.exceptions import ConfigError
from dcp_rs.spark import ReadOptions
from dcp_rs.spark.errors import coded
from dcp_rs.spark.options import options_as_written

MINIMAL = {"connectionString": "couchbase://localhost/travel"}


def parse(**options):
    return ReadOptions.parse(MINIMAL | options)


def test_the_bucket_may_be_in_the_connection_string():
    assert parse().bucket == "travel"
    assert parse(bucket="other").bucket == "other"
    assert parse(connectionString="couchbase://localhost/a%25b").bucket == "a%b"
    with pytest.raises(ConfigError, match=r"^bucket: is missing"):
        ReadOptions.parse({"connectionString": "couchbase://localhost?network=/y"})


def test_the_connection_string_is_needed():
    with pytest.raises(ConfigError, match=r"^connectionString: is missing"):
        ReadOptions.parse({"bucket": "travel"})


def test_changes_are_chosen_by_key_operation_and_time():
    options = parse(keys="order::*, user::?", ops="mutation", since="1970-01-01T01:00:00+00:00")
    assert options.stream()["keys"] == ("order::*", "user::?")
    assert (options.ops, options.since) == (("mutation",), 3600.0)
    assert parse(since="12.5").since == 12.5
    for wrong in ("yesterday", "2026-01-31T00:00:00"):
        with pytest.raises(ConfigError, match="time with its zone"):
            parse(since=wrong)


def test_fields_are_masked_with_a_secret_that_a_file_has(tmp_path):
    (tmp_path / "key").write_text("hunter2 of 16 bytes\n")
    options = parse(
        dropFields='a, cards[].n, ["b, \\"c"]', hashFields="h", hashKeyFile=str(tmp_path / "key")
    )
    stream = options.stream()
    assert stream["drop_fields"] == ("a", "cards[].n", '["b, \\"c"]')
    assert (stream["hash_fields"], stream["hash_key"]) == (("h",), "hunter2 of 16 bytes")
    assert b"hunter2" not in pickle.dumps(options)
    assert "hunter2" not in repr(parse(hashFields="h", hashKey="hunter2 of 16 bytes"))
    with pytest.raises(ConfigError, match=r"^hashKey, hashKeyFile: give one of them"):
        parse(hashFields="h", hashKey="a", hashKeyFile="b")


def test_names_are_taken_in_any_case():
    assert parse(NUMPARTITIONS="7", includevalue="FALSE").num_partitions == 7
    with pytest.raises(ConfigError, match=r"^numPartitions: is given twice"):
        parse(numPartitions="7", numpartitions="8")


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("vbucket", "vbuckets"),
        ("startOffsets", "startingOffsets"),
        ("passwort", "password"),
        ("compress", "compressed"),
    ],
)
def test_an_unknown_option_is_refused_with_a_similar_name(wrong, nearest):
    with pytest.raises(
        ConfigError, match=rf"^{wrong}: there is no such option; did you mean {nearest}\?$"
    ):
        parse(**{wrong: "1"})


def test_no_option_is_suggested_that_is_not_similar():
    with pytest.raises(ConfigError, match=r"^member: there is no such option$"):
        parse(member="0/3")
    with pytest.raises(
        ConfigError, match=r"^scope: there is no such option: .* collections=name\.\*$"
    ):
        parse(scope="inventory")


@pytest.mark.parametrize(
    ("name", "given", "field", "parsed"),
    [
        ("vbuckets", "0-3, 64", "vbuckets", (0, 1, 2, 3, 64)),
        ("vbuckets", [5, 3], "vbuckets", (3, 5)),
        ("vbuckets", range(2), "vbuckets", (0, 1)),
        ("batchBytes", "4m", "batch_bytes", 4 << 20),
        ("batchBytes", "64kb", "batch_bytes", 64 << 10),
        ("batchBytes", 1024, "batch_bytes", 1024),
        ("connectTimeout", "2.5s", "connect_timeout", 2.5),
        ("initialDeletions", "SKIP", "initial_deletions", "skip"),
        ("priority", "High", "priority", "high"),
        ("backfillOrder", "Sequential", "backfill_order", "sequential"),
        ("retryTimeout", "0", "retry_timeout", 0),
        ("retryTimeout", "0s", "retry_timeout", 0),
        ("collections", "a.b, c.d", "collections", ("a.b", "c.d")),
        ("tokenFile", "/run/token", "token_file", "/run/token"),
        ("saslMechanisms", "plain, SCRAM-SHA512", "sasl_mechanisms", ("PLAIN", "SCRAM-SHA512")),
        ("columns", ["op", "key"], "columns", ("op", "key")),
        (
            "include",
            "XATTRS, history, system_events",
            "include",
            ("xattrs", "history", "system_events"),
        ),
        ("compressed", "TRUE", "compressed", True),
        ("startingOffsets", "EARLIEST", "starting_offsets", "earliest"),
        ("metadata", "Full", "metadata", "full"),
        ("collections", None, "collections", None),
    ],
)
def test_values_are_text_or_of_their_type(name, given, field, parsed):
    assert getattr(parse(**{name: given}), field) == parsed


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("vbuckets", "3-1"),
        ("vbuckets", "3-"),
        ("vbuckets", "x"),
        ("vbuckets", "70000"),
        ("vbuckets", -1),
        ("vbuckets", 5.5),
        ("numPartitions", "0"),
        ("numPartitions", "many"),
        ("numPartitions", "65536"),
        ("maxOffsetsPerTrigger", str(1 << 63)),
        ("batchBytes", "4mm"),
        ("batchBytes", "4 megabytes"),
        ("batchBytes", "17m"),
        ("batchRows", "10000001"),
        ("flowControlBufferBytes", "1k"),
        ("connectTimeout", "nan"),
        ("connectTimeout", "-1"),
        ("connectTimeout", "0"),
        ("connectTimeout", "soon"),
        ("retryTimeout", "-1"),
        ("retryTimeout", "inf"),
        ("retryTimeout", "1e9"),
        ("saslMechanisms", "SCRAM"),
        ("include", "caught_up"),
        ("includeValue", "perhaps"),
        ("metadata", "most"),
        ("network", "externl"),
        ("keyType", "text"),
        ("onRollback", "raise"),
        ("collections", "a,,b"),
        ("collections", 5),
        ("startingOffsets", "yesterday"),
        ("startingOffsets", '{"0": 3}'),
        ("endingOffsets", "[3]"),
        ("username", 5),
    ],
)
def test_a_wrong_value_is_refused_by_the_options_name(name, wrong):
    with pytest.raises(ConfigError, match=rf"^{name}: "), options_as_written():
        parse(**{name: wrong}).connection()


def test_an_error_of_the_engine_calls_options_as_spark_does():
    options = {"connectionString": "couchbase://localhost/travel"}
    for more, said in [
        ({"columns": "value", "includeValue": "false"}, "^columns: .* includeValue=false"),
        ({"valueFormat": "string", "includeValue": "false"}, "^valueFormat: .* includeValue=false"),
        ({"columns": "batch_rows"}, 'no column "batch_rows"'),
        ({"tlsKey": "key.pem"}, "^tlsCertificate, tlsKey: give both"),
        ({"connectTimeout": "1e6"}, "^connectTimeout: "),
    ]:
        with pytest.raises(ConfigError, match=said):
            dcp_rs.spark.partitions(options | more)
    error = coded(ConfigError("1 is too little", option="buffer_size"), "reading")
    assert str(error) == "[COUCHBASE_DCP_CONFIG] reading: flowControlBufferBytes: 1 is too little"


def test_the_limit_of_a_micro_batch_has_its_name_in_every_error():
    error = ConfigError("0 is too little", option="max_seqnos")
    said = "[COUCHBASE_DCP_CONFIG] planning: maxOffsetsPerTrigger: 0 is too little"
    assert str(coded(error, "planning")) == said
    with pytest.raises(ConfigError, match="did you mean maxOffsetsPerTrigger"):
        parse(maxOffsetPerTrigger="5")
    for wrong in ("many", "-1", "1.5", str(1 << 63), 1.5, True):
        with pytest.raises(ConfigError, match=r"^maxOffsetsPerTrigger: ") as caught:
            parse(maxOffsetsPerTrigger=wrong)
        assert caught.value.option == "maxOffsetsPerTrigger"
        old = pytest.warns(
            DeprecationWarning, match="^maxRowsPerTrigger is .* maxOffsetsPerTrigger$"
        )
        with old, pytest.raises(ConfigError, match=r"^maxOffsetsPerTrigger: "):
            parse(maxRowsPerTrigger=wrong)


def test_every_option_is_used():
    package = Path(dcp_rs.spark.__file__).parent
    trees = [ast.parse(path.read_text()) for path in package.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert len(read) > 50
    assert {each.name for each in fields(ReadOptions)} <= read


def test_the_password_is_given_in_one_way(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^password, passwordFile, passwordEnv: give one"):
        parse(password="a", passwordEnv="B")
    secret = tmp_path / "password"
    secret.write_text("from a file\n")
    monkeypatch.setenv("CB_PASSWORD", "from the environment")
    assert parse(username="u", password="as it is").connection().password == "as it is"
    from_file = parse(username="u", passwordFile=str(secret)).connection()
    assert (from_file.password, from_file.password_file) == (None, str(secret))
    from_variable = parse(username="u", passwordEnv="CB_PASSWORD").connection()
    assert from_variable.password == "from the environment"
    with pytest.raises(ConfigError, match="NOT_THERE is not set"):
        parse(passwordEnv="NOT_THERE").connection()
    with pytest.raises(ConfigError, match=r"^passwordFile: "):
        parse(passwordFile=str(tmp_path / "none")).connection()


def test_a_token_is_given_in_one_way_and_without_a_user():
    for other in ("tokenFile", "username", "password", "passwordFile", "passwordEnv"):
        with pytest.raises(ConfigError, match=rf"^token, {other}: give one of them") as caught:
            parse(**{"token": "x", other: "y"})
        assert caught.value.option == "token"
    with pytest.raises(ConfigError, match=r"^tokenFile, username: give one of them"):
        parse(tokenFile="f", username="u")
    options = parse(token="hunter2").connection()
    assert (options.token, options.token_file, options.name) == ("hunter2", None, "spark")
    assert parse(tokenFile="f").connection().token_file == "f"


def test_the_repr_shows_no_password():
    options = parse(password="hunter2", token=None)
    assert "hunter2" not in repr(options)
    assert "hunter2" not in repr(parse(token="hunter2"))
    assert pickle.loads(pickle.dumps(options)) == options
    # Nor where none belongs.
    for address in ("couchbase://u:hunter2@h/travel", "couchbase://h/travel?network=hunter2"):
        assert "hunter2" not in repr(parse(connectionString=address))


@pytest.mark.parametrize("condition", ["DATA_SOURCE_ALREADY_EXISTS", "ANOTHER"])
def test_a_source_that_spark_has_found_by_itself_may_be_registered(condition):
    from pyspark.errors import AnalysisException

    class Refused(AnalysisException):
        def getCondition(self):  # noqa: N802
            return condition

    class Session:
        """As PySpark 4.0 with the wheel on its path."""

        dataSource = property(lambda self: self)  # noqa: N815

        def register(self, _):
            raise Refused("refused")

    may_raise = nullcontext() if condition.startswith("DATA") else pytest.raises(Refused)
    with may_raise:
        dcp_rs.spark.register(Session())


def test_what_is_no_session_and_no_partition_is_refused():
    with pytest.raises(ConfigError, match="spark: must be a SparkSession, not int"):
        dcp_rs.spark.register(5)
    with pytest.raises(ConfigError, match="partition: must be a partition from"):
        next(dcp_rs.spark.read_partition(5))


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ({"retryTimeout": "-1"}, "retryTimeout", "-1"),
        ({"batchRows": "10000001"}, "batchRows", 10_000_001),
        ({"flowControlBufferBytes": "1k"}, "flowControlBufferBytes", 1024),
        ({"tlsKey": "k"}, "tlsCertificate", None),
        ({"tlsKeyPassword": "hunter2"}, "tlsKeyPassword", None),
        ({"password": 5}, "password", None),
        ({"documentSchema": "a NOPE"}, "documentSchema", None),
        ({"onMalformed": "fail"}, "onMalformed", None),
        ({"columns": "nope"}, "columns", "nope"),
        ({"dropFields": "a b"}, "dropFields", None),
        ({"hashKey": "hunter2 of 16 bytes"}, "hashKey", None),
        ({"hashKey": "hunter2", "hashFields": "a"}, "hashKey", None),
        ({"dropFields": "a", "include": "xattrs"}, "dropFields", None),
        ({"passwort": "hunter2"}, "passwort", None),
    ],
)
def test_error_has_its_option_as_spark_calls_it(given, option, value):
    with pytest.raises(ConfigError) as caught, options_as_written():
        parse(**given).connection()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.option, error.value) == (option, value), error
    assert str(error).startswith(option)
    assert "hunter2" not in str(error)
