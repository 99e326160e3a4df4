"""The package itself: names, documentation, types."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_rs
import dcp_rs.spark
from dcp_rs import _dcp_rs, debug, exceptions, planner, testing
from dcp_rs.replication import decoding
from dcp_rs.replication.kafka import session

ERRORS = Path(__file__).parents[2] / "docs/reference/errors.md"
MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(dcp_rs.__path__, "dcp_rs.")
    if not name.startswith("dcp_rs.spark") and name not in {"dcp_rs._dcp_rs", "dcp_rs.__main__"}
)


@pytest.mark.parametrize("name", ["dcp_rs", *MODULES])
@pytest.mark.default_password
def test_the_examples_in_the_documentation_run(name):
    module = importlib.import_module(name)
    names = {each: getattr(dcp_rs, each) for each in dcp_rs.__all__} | {"dcp_rs": dcp_rs}
    names |= {each: getattr(testing, each) for each in testing.__all__}
    result = doctest.testmod(module, extraglobs=names, raise_on_error=False)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(
        len(test.examples)
        for name in ["dcp_rs", *MODULES]
        for test in finder.find(importlib.import_module(name))
    )
    assert examples >= 15


def test_the_public_names_are_sorted_and_documented():
    assert exceptions.__all__ == sorted(exceptions.__all__)
    looked_at = 0
    modules = [dcp_rs, testing, debug]
    assert all(module.__all__ == sorted(module.__all__) for module in modules)
    public = {each: getattr(module, each) for module in modules for each in module.__all__}
    for name, each in public.items():
        if inspect.isclass(each):
            assert each.__doc__, name
            for member, value in vars(each).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    looked_at += 1
                    assert inspect.getdoc(value), f"{name}.{member}"
        elif callable(each):
            looked_at += 1
            assert inspect.getdoc(each), name
    assert looked_at > 50


@pytest.mark.parametrize(
    ("function", "of"),
    [
        (dcp_rs.Client.stream, "stream"),
        (dcp_rs.Schema, "stream"),
        (dcp_rs.connect, "connection"),
        (dcp_rs.ConnectionOptions, "connection"),
        (dcp_rs.BatchPolicy, "batch"),
        (dcp_rs.DocumentSchema, "documents"),
        (planner.PlanOptions, "plan"),
        (planner.Planner, "stream"),
        (testing.EmbeddedCluster, "cluster"),
        (testing.Limits, "limits"),
    ],
)
def test_a_signature_shows_the_defaults_of_the_engine(function, of):
    # Stores are this package's own, which the engine does not know.
    own = {"default"} if function is dcp_rs.Client.stream else set()
    declared = _dcp_rs.defaults()[of]
    shown = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in {"self", "client", "connection_string", *own}
    }
    assert shown == {name: declared[name] for name in shown}
    assert all(type(shown[name]) is type(declared[name]) for name in shown)
    if function not in {dcp_rs.Schema, planner.Planner}:
        assert shown.keys() == declared.keys() - {"connection_string"}


def test_a_connection_has_the_same_options_wherever_they_are_given():
    options = inspect.signature(dcp_rs.ConnectionOptions).parameters
    connecting = inspect.signature(dcp_rs.connect).parameters
    assert inspect.signature(dcp_rs.connect_async).parameters == connecting
    assert connecting["connection_string"].annotation == "str | ConnectionOptions"
    assert options["connection_string"].annotation == "str"
    declared, taken = (
        {
            name: (each.annotation, each.default, each.kind)
            for name, each in parameters.items()
            if name != "connection_string"
        }
        for parameters in (options, connecting)
    )
    assert len(declared) >= 18
    assert taken == declared


def test_a_stream_has_few_options_and_each_is_documented():
    for function, most in [(dcp_rs.Client.stream, 25), (dcp_rs.connect, 22)]:
        names = inspect.signature(function).parameters.keys() - {"self"}
        assert len(names) <= most
        documented = inspect.getdoc(function)
        assert [name for name in names if f"    {name}: " not in documented] == []


def test_every_error_is_caught_by_one_class():
    for name in exceptions.__all__:
        assert issubclass(getattr(exceptions, name), exceptions.DcpError)


def test_every_error_has_a_code_and_the_reference_lists_it():
    rows = [each.split("|") for each in ERRORS.read_text().splitlines() if each.startswith("| `")]
    listed = {row[1].strip(" `"): re.findall(r"`(\w+)`", row[3]) for row in rows}
    assert sorted(listed) == sorted(set(exceptions.__all__) - {"DcpError"})
    for name, codes in listed.items():
        assert getattr(exceptions, name).code == codes[0], name
        assert getattr(exceptions, name)("text").code == codes[0], name


def test_the_public_face_is_what_a_reader_of_changes_needs():
    given = {
        "connect connect_async AsyncClient",
        "Client ConnectionOptions ChangeStream ChangeBatch DocumentSchema Schema columns",
        "Checkpoint Position CheckpointStore FileStore MemoryStore",
        "replicate verify Pipeline",
        "SharedStore SqlStore ObjectStore",
        # Values of options.
        "BatchPolicy Share",
        "Partition ReadPlan",
        "DcpError exceptions testing __version__",
        # What these return.
        "ColumnInfo StoredFilter StreamEvent StreamStats VbucketStats",
    }
    assert set(dcp_rs.__all__) == set(" ".join(given).split())


def test_every_class_of_the_extension_is_wrapped():
    """Whatever the extension module can do, the package offers or uses."""
    wrappers = {
        "ArrowBatch": decoding.Decoder,
        "AsyncTurn": dcp_rs.ChangeStream,
        "ChangeBatch": dcp_rs.ChangeBatch,
        "ChangeStream": dcp_rs.ChangeStream,
        "Checkpoint": dcp_rs.Checkpoint,
        "CheckpointLock": dcp_rs.FileStore,
        "Client": dcp_rs.Client,
        "DecodedDocuments": decoding.Decoder,
        "DocumentDecoder": decoding.Decoder,
        "Inference": decoding.Inference,
        "KafkaProducer": session.Session,
        "Pending": dcp_rs.AsyncClient,
        "Planner": planner.Planner,
        "ReadPlan": dcp_rs.Partition,
        "EmbeddedCluster": dcp_rs.testing.EmbeddedCluster,
        "Schema": dcp_rs.Schema,
    }
    classes = {name: each for name, each in vars(_dcp_rs).items() if inspect.isclass(each)}
    assert classes.keys() == wrappers.keys()
    looked_at = 0
    for name, each in classes.items():
        bases = inspect.getmro(wrappers[name])[:-1]
        if name == "Client":
            bases += (dcp_rs.AsyncClient,)
        source = "".join(inspect.getsource(inspect.getmodule(base)) for base in bases)
        for member in vars(each):
            if not member.startswith("__"):
                looked_at += 1
                assert f".{member}" in source, f"{name}.{member} is not used"
    assert looked_at > 30


def test_the_extension_returns_types_and_no_tuples_or_dicts_of_fields():
    """A tuple or dict that it returns is a row, something by vBucket or name, or Arrow's."""
    stub = ast.parse(Path(_dcp_rs.__file__).with_name("_dcp_rs.pyi").read_text())
    functions = [each for each in ast.walk(stub) if isinstance(each, ast.FunctionDef)]
    assert len(functions) > 100
    returned = {each.name: ast.unparse(each.returns) for each in functions}
    assert {
        name: each for name, each in returned.items() if "tuple[" in each or "dict[" in each
    } == {
        "__arrow_c_array__": "tuple[object, object]",
        "by_collection": "dict[int | None, tuple[list[ArrowBatch], int, int | None]]",
        "collection_lag": "dict[str, int | None]",
        "defaults": "dict[str, dict[str, Any]]",
        "collections": "dict[str, int]",
        "high_seqnos": "dict[int, int]",
        "high_seqnos_async": "Pending[dict[int, int]]",
        "positions": "dict[int, Position]",
        "seqnos": "dict[int, int]",
        "to_dicts": "list[dict[str, Any]]",
        "to_tuples": "Iterator[tuple[Any, ...]]",
        "vbuckets_by_node": "dict[str, list[int]]",
    }


def test_importing_it_imports_nothing_that_reading_does_not_need():
    program = (
        "import sys, dcp_rs; "
        "print(sorted({'pyarrow', 'pandas', 'pyspark', 'polars', 'numpy', 'asyncio', 'hashlib', "
        "'dcp_rs.async_client', 'dcp_rs.replication', 'dcp_rs.testing'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_each_public_name_is_there_and_no_other():
    program = (
        "import dcp_rs; "
        "print(set(dcp_rs.__all__) - set(dir(dcp_rs))); "
        "print([each for each in dcp_rs.__all__ if not hasattr(dcp_rs, each)]); "
        "print([getattr(dcp_rs, each).__name__ for each in ('testing', 'SqlStore', 'replicate')]); "
        "dcp_rs.nothing"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )
    names = "['dcp_rs.testing', 'SqlStore', 'replicate']"
    assert done.stdout.splitlines() == ["set()", "[]", names]
    assert "AttributeError: module 'dcp_rs' has no attribute 'nothing'" in done.stderr


def test_each_module_that_the_documentation_names_is_there_without_an_import_of_its_own():
    guides = [path.read_text() for path in ERRORS.parents[1].rglob("*.md")]
    modules = {each.name for each in pkgutil.iter_modules(dcp_rs.__path__)}
    # Libraries import the plugin by its own name.
    named = set(re.findall(r"\bdcp_rs\.([a-z_]+)", "\n".join(guides))) & modules - {"pytest_plugin"}
    assert {"dlt", "metrics", "polars", "ray", "replication", "spark"} <= named
    program = (
        "import dcp_rs; "
        f"print([each for each in {sorted(named)} if not hasattr(dcp_rs, each)]); "
        f"print(set({sorted(named)}) - set(dir(dcp_rs))); "
        "print(dcp_rs.replication.infer_schemas.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["[]", "set()", "infer_schemas"], done.stderr


def test_the_module_that_spark_looks_for_is_installed_and_lazy():
    """Spark imports it in every driver, with or without our native code, and it may never raise."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
        "import pyspark_couchbase_dcp as found\n"
        "print(hasattr(found, 'DefaultSource'), [each for each in sys.modules if 'dcp_rs' in each])"
    )
    has_spark = importlib.util.find_spec("pyspark") is not None
    for hidden, is_found in [(["pyspark"], False), ([], has_spark)]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program.format(hidden=hidden)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{is_found} []\n"


def test_a_missing_pyarrow_is_named_with_its_extra(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (
        lambda: client.stream(until="now").read_all(),
        lambda: client.stream(until="now").schema,
        lambda: dcp_rs.Schema().to_pyarrow(),
    ):
        with pytest.raises(ImportError, match=r"dcp-rs\[arrow\]"):
            use()
    # Without it rows can be read all the same.
    assert list(client.stream(until="now")) == []
