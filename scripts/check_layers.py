"""Checks the dependencies between crates, and that `import dcp_rs` loads no optional library.

    dcp-wire <- dcp-proto <- {dcp-consumer, dcp-arrow} <- dcp-python <- python/dcp_rs
                dcp-kafka <- dcp-python
                dcp-proto <- dcp-producer-proto <- dcp-producer <- dcp-python

Usage: scripts/check_layers.py [--self-test]

With --self-test it adds forbidden dependencies to a copy of the manifests and of the Python package
and fails if any is not detected.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ASYNC = frozenset({"tokio", "tokio-util", "tokio-rustls", "mio", "socket2", "async-io", "smol"})
TLS = frozenset({"rustls", "native-tls", "openssl"})
PYTHON = frozenset({"pyo3", "pyo3-ffi", "pyo3-async-runtimes", "numpy"})
ARROW = frozenset({"arrow", "arrow-array", "arrow-schema", "arrow-buffer", "arrow-select"})
# Whoever only reads a bucket compiles no producer.
PRODUCER = frozenset({"dcp-producer-proto", "dcp-producer"})


@dataclass(frozen=True)
class Layer:
    """Which crates one crate of the workspace may and may not reach by its normal dependencies."""

    may_use: frozenset[str]
    """Crates of this workspace that it may name in its manifest."""
    never: frozenset[str]
    """Crates that may not be reached at all, however far away."""
    pure: bool = False
    """No IO, clock or randomness: carries the clippy.toml that says so."""


def _layer(may_use: str, *never: frozenset[str], pure: bool = False) -> Layer:
    return Layer(frozenset(may_use.split()), frozenset().union(*never), pure)


LAYERS = {
    "dcp-wire": _layer(
        "", ASYNC, TLS, PYTHON, ARROW, frozenset({"tracing", "serde_json", "rand"}), pure=True
    ),
    "dcp-proto": _layer("dcp-wire", ASYNC, TLS, PYTHON, ARROW, frozenset({"rand"}), pure=True),
    "dcp-producer-proto": _layer(
        "dcp-wire dcp-proto", ASYNC, TLS, PYTHON, ARROW, frozenset({"rand"}), pure=True
    ),
    "dcp-consumer": _layer("dcp-wire dcp-proto", PYTHON, ARROW, PRODUCER),
    "dcp-producer": _layer("dcp-wire dcp-proto dcp-producer-proto", PYTHON, ARROW),
    "dcp-arrow": _layer("dcp-wire dcp-proto", ASYNC, TLS, PYTHON, PRODUCER),
    # It loads librdkafka: no TLS of ours.
    "dcp-kafka": _layer("", ASYNC, TLS, PYTHON, ARROW),
    "dcp-python": _layer(
        "dcp-wire dcp-proto dcp-producer-proto dcp-consumer dcp-producer dcp-arrow dcp-kafka"
    ),
    # Never part of the product: a development dependency of the crates above.
    "dcp-test": _layer("dcp-wire dcp-proto dcp-producer-proto", PYTHON),
    "dcp-sim": _layer("dcp-wire dcp-proto dcp-consumer dcp-producer dcp-test", PYTHON, ARROW),
    "dcp-fuzz": _layer("dcp-wire dcp-proto dcp-producer dcp-arrow dcp-meter dcp-test", PYTHON),
    "dcp-loom": _layer("dcp-wire dcp-proto", ASYNC, TLS, PYTHON, ARROW),
    "dcp-meter": _layer("", ASYNC, TLS, PYTHON, ARROW),
    "dcp-e2e": _layer("dcp-wire dcp-proto dcp-consumer dcp-producer dcp-arrow dcp-test", PYTHON),
    "dcp-benches": _layer(
        "dcp-wire dcp-proto dcp-consumer dcp-producer dcp-arrow dcp-test", PYTHON
    ),
}

# One by what PyO3 makes of its macros, one in its module `library`.
MAY_BE_UNSAFE = frozenset({"dcp-python", "dcp-kafka"})

# Calls and types that the pure crates' clippy.toml must forbid.
PURE_METHODS = frozenset(
    {"std::time::Instant::now", "std::time::SystemTime::now", "std::thread::sleep", "rand::rng"}
)
PURE_TYPES = frozenset({"std::net::TcpStream", "std::net::TcpListener", "std::net::UdpSocket"})

OPTIONAL_LIBRARIES = frozenset(
    {
        "adbc_driver_postgresql",
        "confluent_kafka",
        "deltalake",
        "duckdb",
        "numpy",
        "pandas",
        "pyarrow",
        "pyiceberg",
        "pyspark",
    }
)


# ----- Rust -----


def _cargo(root: Path, *arguments: str) -> str:
    finished = subprocess.run(
        ["cargo", *arguments, "--manifest-path", str(root / "Cargo.toml")],
        check=False,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        raise SystemExit(f"cargo {arguments[0]} failed:\n{finished.stderr}")
    return finished.stdout


def _reached_by(root: Path, crate: str, *flags: str) -> set[str]:
    """Returns every crate that `crate` depends on."""
    tree = _cargo(
        root, "tree", "-p", crate, "-e", "normal,build", "--target", "all", "--prefix", "none",
        "--format", "{p}", *flags,
    )  # fmt: skip
    return {line.split()[0] for line in tree.splitlines() if line.strip()} - {crate}


def rust_violations(root: Path, *flags: str) -> list[str]:
    """Lists every forbidden dependency in the workspace at `root`."""
    metadata = json.loads(_cargo(root, "metadata", "--format-version", "1", "--no-deps", *flags))
    named = {
        package["name"]: {
            dependency["name"]
            for dependency in package["dependencies"]
            if dependency["kind"] != "dev"
        }
        for package in metadata["packages"]
    }
    violations = [
        f"{crate} has no layer in scripts/check_layers.py" for crate in named.keys() - LAYERS
    ]
    violations += [f"{crate} is not in the workspace" for crate in LAYERS.keys() - named]
    for crate, layer in LAYERS.items():
        if crate not in named:
            continue
        inside = named[crate] & named.keys()
        violations += [f"{crate} may not use {other}" for other in sorted(inside - layer.may_use)]
        reached = _reached_by(root, crate, *flags)
        violations += [f"{crate} may not reach {other}" for other in sorted(reached & layer.never)]
        if layer.pure:
            violations += _purity_violations(root / "crates" / crate / "clippy.toml", crate)
    return violations


def _purity_violations(path: Path, crate: str) -> list[str]:
    """Checks that a pure crate's clippy.toml forbids clocks, sleeping and sockets."""
    if not path.exists():
        return [f"{crate} has no clippy.toml"]
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    forbidden = {
        entry["path"]
        for key in ("disallowed-methods", "disallowed-types")
        for entry in config.get(key, [])
    }
    missing = (PURE_METHODS | PURE_TYPES) - forbidden
    return [f"{crate}: clippy.toml does not forbid {path}" for path in sorted(missing)]


def unsafe_violations(root: Path) -> list[str]:
    """Lists the crates that do not forbid unsafe code, except those that may have some."""
    return [
        f"{manifest.parent.name} does not carry #![forbid(unsafe_code)]"
        for manifest in sorted(root.glob("crates/*/Cargo.toml"))
        if manifest.parent.name not in MAY_BE_UNSAFE
        and "#![forbid(unsafe_code)]"
        not in (manifest.parent / "src" / "lib.rs").read_text(encoding="utf-8")
    ]


# ----- Python -----


def _imported_at_import_time(node: ast.AST) -> list[tuple[int, str]]:
    """Lists (line, top-level module) of the imports that run when the module is imported."""
    found: list[tuple[int, str]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            found += [(child.lineno, alias.name.split(".")[0]) for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and not child.level and child.module:
            found.append((child.lineno, child.module.split(".")[0]))
        found += _imported_at_import_time(child)
    return found


# Modules that are only imported after their library was found.
NEEDS = {
    "dcp_rs/spark/source.py": "pyspark",
    "dcp_rs/replication/changes.py": "pyarrow",
    "dcp_rs/replication/decoding.py": "pyarrow",
    "dcp_rs/replication/comparing.py": "pyarrow",
    "dcp_rs/replication/contents.py": "pyarrow",
    "dcp_rs/replication/delta_contents.py": "pyarrow",
    "dcp_rs/replication/group.py": "pyarrow",
    "dcp_rs/replication/history.py": "pyarrow",
    "dcp_rs/replication/table.py": "pyarrow",
    "dcp_rs/replication/tables.py": "pyarrow",
    "dcp_rs/replication/waiting.py": "pyarrow",
    "dcp_rs/replication/delta_rejects.py": "pyarrow",
    "dcp_rs/replication/kafka/records.py": "pyarrow",
    "dcp_rs/replication/kafka/session.py": "pyarrow",
    "dcp_rs/replication/kafka/target.py": "pyarrow",
    "dcp_rs/replication/postgres/refusals.py": "pyarrow",
    "dcp_rs/replication/reader.py": "pyarrow",
    "dcp_rs/replication/rejects.py": "pyarrow",
    "dcp_rs/replication/sampling.py": "pyarrow",
    "dcp_rs/replication/schemas.py": "pyarrow",
    "dcp_rs/spark/merge.py": "pyarrow",
}


def python_violations(package: Path) -> list[str]:
    """Lists imports of optional libraries that run when a module of `package` is imported."""
    modules = sorted(package.rglob("*.py"))
    if not modules:
        return [f"no module found in {package}"]
    violations = []
    for module in modules:
        tree = ast.parse(module.read_text(encoding="utf-8"), filename=str(module))
        name = module.relative_to(package.parent)
        violations += [
            f"{name}:{line} imports {library} at import time"
            for line, library in _imported_at_import_time(tree)
            if library in OPTIONAL_LIBRARIES and NEEDS.get(name.as_posix()) != library
        ]
        in_spark = "spark" in name.parts
        violations += [
            f"{name} uses pyspark outside dcp_rs.spark"
            for node in ast.walk(tree)
            if not in_spark
            and isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "pyspark"
        ]
    return violations


IMPORT_WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {libraries!r}:
            raise ImportError(name + " is not there")

sys.meta_path.insert(0, Refuse())
import dcp_rs, dcp_rs.spark
loaded = {libraries!r} & {{name.split(".")[0] for name in sys.modules}}
assert not loaded, loaded
"""


def import_violations(search_path: Path | None = None) -> list[str]:
    """Imports dcp_rs, installed or from `search_path`, without optional libraries."""
    program = IMPORT_WITHOUT.format(libraries=set(OPTIONAL_LIBRARIES))
    if search_path is not None:
        program = f"import sys; sys.path.insert(0, {str(search_path)!r})\n{program}"
    finished = subprocess.run(
        [sys.executable, "-I", "-c", program], check=False, capture_output=True, text=True
    )
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["no output"])[-1]
        return [f"import dcp_rs needs an optional library: {last}"]
    return []


# ----- the check and its self-test -----


def check(root: Path) -> list[str]:
    """Runs every check on the repository at `root` and on the installed package."""
    return [
        *rust_violations(root, "--locked"),
        *unsafe_violations(root),
        *python_violations(root / "python" / "dcp_rs"),
        *import_violations(),
    ]


def _copy_manifests(root: Path, target: Path) -> None:
    """Copies what cargo needs to resolve the workspace, with empty sources."""
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copy(root / name, target / name)
    metadata = json.loads(_cargo(root, "metadata", "--format-version", "1", "--no-deps"))
    for package in metadata["packages"]:
        manifest = Path(package["manifest_path"])
        folder = target / manifest.relative_to(root).parent
        (folder / "src").mkdir(parents=True)
        for name in ("Cargo.toml", "clippy.toml"):
            if (manifest.parent / name).exists():
                shutil.copy(manifest.parent / name, folder / name)
        for each in package["targets"]:
            source = target / Path(each["src_path"]).relative_to(root)
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text("#![forbid(unsafe_code)]\nfn main() {}\n", encoding="utf-8")


FORGED_CRATES = [
    ("dcp-wire", "tokio.workspace = true", "dcp-wire may not reach tokio"),
    ("dcp-producer-proto", "tokio.workspace = true", "dcp-producer-proto may not reach tokio"),
    ("dcp-arrow", "tokio.workspace = true", "dcp-arrow may not reach tokio"),
    (
        "dcp-consumer",
        "dcp-producer-proto.workspace = true",
        "dcp-consumer may not reach dcp-producer-proto",
    ),
    ("dcp-consumer", "dcp-producer.workspace = true", "dcp-consumer may not use dcp-producer"),
    ("dcp-producer", "dcp-consumer.workspace = true", "dcp-producer may not use dcp-consumer"),
    ("dcp-producer", "dcp-arrow.workspace = true", "dcp-producer may not reach arrow-array"),
    ("dcp-python", "dcp-test.workspace = true", "dcp-python may not use dcp-test"),
]
FORGED_MODULES = [
    ("import pyarrow as pa\n", "imports pyarrow at import time"),
    ("try:\n    from pandas import DataFrame\nexcept ImportError:\n    pass\n", "imports pandas"),
    ("class A:\n    import numpy\n", "imports numpy at import time"),
    ("def f():\n    from pyspark.sql import Row\n", "uses pyspark outside dcp_rs.spark"),
]


def _unnoticed_in_rust(root: Path) -> list[str]:
    unnoticed = []
    for crate, line, expected in FORGED_CRATES:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            _copy_manifests(root, copy)
            manifest = copy / "crates" / crate / "Cargo.toml"
            before = manifest.read_text(encoding="utf-8")
            forged = before.replace("[dependencies]\n", f"[dependencies]\n{line}\n", 1)
            manifest.write_text(forged, encoding="utf-8")
            if expected not in rust_violations(copy, "--offline"):
                unnoticed.append(expected)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy_manifests(root, copy)
        (copy / "crates" / "dcp-proto" / "clippy.toml").write_text("", encoding="utf-8")
        (copy / "crates" / "dcp-arrow" / "src" / "lib.rs").write_text("", encoding="utf-8")
        expected = "dcp-proto: clippy.toml does not forbid std::time::Instant::now"
        if expected not in rust_violations(copy, "--offline"):
            unnoticed.append(expected)
        if not unsafe_violations(copy):
            unnoticed.append("dcp-arrow does not carry #![forbid(unsafe_code)]")
    return unnoticed


def _unnoticed_in_python() -> list[str]:
    unnoticed = []
    for source, expected in FORGED_MODULES:
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "dcp_rs"
            (package / "spark").mkdir(parents=True)
            (package / "spark" / "__init__.py").touch()
            (package / "__init__.py").write_text(source, encoding="utf-8")
            if not any(expected in found for found in python_violations(package)):
                unnoticed.append(expected)
            if source.startswith("import") and not import_violations(Path(folder)):
                unnoticed.append(f"at run time: {expected}")
    return unnoticed


def main(arguments: list[str]) -> int:
    """Prints all problems, one per line; returns the exit code."""
    if arguments == ["--self-test"]:
        wrong = [f"went unnoticed: {edge}" for edge in _unnoticed_in_rust(ROOT)]
        wrong += [f"went unnoticed: {edge}" for edge in _unnoticed_in_python()]
        done = f"{len(FORGED_CRATES) + len(FORGED_MODULES) + 3} forged violations noticed"
    else:
        wrong = check(ROOT)
        done = f"{len(LAYERS)} crates and python/dcp_rs keep to their layers"
    for line in wrong:
        print(f"layers: {line}", file=sys.stderr)
    if not wrong:
        print(f"layers: {done}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
