"""Checks that sibling modules of a crate, or of a Python package, do not depend on each other.

A module and its children may depend on each other, and tests on everything. Using a re-exported
name counts as using the module that defines it. Python imports for type checkers only do not count.

Usage: scripts/check_circles.py [--self-test]

With --self-test it generates circular dependencies and fails if any is not detected.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent

Name = tuple[str, ...]
"""A module or an item by its path below the crate's root or the package."""


@dataclass
class Module:
    """The imports of a module, and the paths it names."""

    names: dict[str, Name] = field(default_factory=dict)
    """Imported names, with what they stand for."""
    used: set[Name] = field(default_factory=set)


Modules = dict[Name, Module]


# ----- Rust -----

_NOISE = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | b?r(\#*)".*?"\1 | b?"(?:\\.|[^"\\])*" | b?'(?:\\.[^']*|[^'\\])'""",
    re.DOTALL | re.VERBOSE,
)
_TESTS = re.compile(
    r"#\[cfg\((?:all\()?test\b[^]]*\]\s*(?:#\[[^]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*([;{])"
)
_USE = re.compile(r"\buse\s+([^;]*);")
_PATH = re.compile(r"(?<![\w:$])(?:crate|super|self)(?:::\w+)+")


def _without_noise(source: str) -> str:
    """Returns the code without comments, strings and character literals."""
    return _NOISE.sub('""', source)


def _without_tests(code: str) -> tuple[str, set[str]]:
    """Returns the code without its test modules, and the names of those in separate files."""
    files = set()
    while found := _TESTS.search(code):
        end = found.end()
        if found[2] == ";":
            files.add(found[1])
        else:
            depth = 1
            while depth and end < len(code):
                depth += {"{": 1, "}": -1}.get(code[end], 0)
                end += 1
        code = code[: found.start()] + code[end:]
    return code, files


def _expand(tree: str) -> list[str]:
    """Returns every path of a use tree: `a::{b, c::d}` is `a::b` and `a::c::d`."""
    before, brace, rest = tree.partition("{")
    if not brace:
        return [tree.strip()]
    parts, depth, start = [], 0, 0
    inner = rest.rpartition("}")[0]
    for at, char in enumerate(inner):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append(inner[start:at])
            start = at + 1
    parts.append(inner[start:])
    return [before.strip() + path for part in parts if part.strip() for path in _expand(part)]


def _absolute(path: str, module: Name, children: set[str]) -> Name | None:
    """Returns the path from the crate's root, or nothing for another crate."""
    first, *rest = path.split("::")
    base = list(module)
    if first == "crate":
        base = []
    elif first == "super":
        base = base[:-1]
        while rest and rest[0] == "super":
            base, rest = base[:-1], rest[1:]
    elif first in children:
        rest = [first, *rest]
    elif first != "self":
        return None
    return (*base, *rest)


def rust_modules(source: Path) -> Modules:
    """Returns the modules of the crate with sources in `source`, except its tests."""
    codes: dict[Name, str] = defaultdict(str)
    tests: set[Name] = set()
    for file in sorted(source.rglob("*.rs")):
        name = file.relative_to(source).with_suffix("").parts
        if name[-1] in {"lib", "main", "mod"}:
            name = name[:-1]
        code, in_files = _without_tests(_without_noise(file.read_text(encoding="utf-8")))
        codes[name] += code
        tests |= {(*name, test) for test in in_files}
    modules: Modules = {}
    for name, code in codes.items():
        if not any(name[:depth] in tests for depth in range(1, len(name) + 1)):
            children = {other[-1] for other in codes if other and other[:-1] == name}
            modules[name] = _rust_module(name, code, children)
    return modules


def _rust_module(name: Name, code: str, children: set[str]) -> Module:
    module = Module()
    for tree in _USE.findall(code):
        for each in _expand(tree):
            path, _, alias = re.sub(r"\s+", " ", each).partition(" as ")
            path = path.removesuffix("::self")
            target = _absolute(path, name, children)
            if target is not None:
                module.names[alias or path.split("::")[-1]] = target
                module.used.add(target)
    for path in _PATH.findall(_USE.sub("", code)):
        target = _absolute(path, name, children)
        if target is not None:
            module.used.add(target)
    return module


# ----- Python -----


class _Imports(ast.NodeVisitor):
    """Collects the imports of a module from its own package."""

    def __init__(self, package: str, name: Name, *, is_package: bool) -> None:
        self.package = package
        self.base = name if is_package else name[:-1]
        self.module = Module()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first, *rest = alias.name.split(".")
            if first == self.package:
                self.module.used.add(tuple(rest))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        path = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            path = (*self.base[: len(self.base) + 1 - node.level], *path)
        elif path[:1] == (self.package,):
            path = path[1:]
        else:
            return
        for alias in node.names:
            self.module.names[alias.asname or alias.name] = (*path, alias.name)
            self.module.used.add((*path, alias.name))


def python_modules(package: Path) -> Modules:
    """Returns the modules of the package in the folder `package`."""
    modules: Modules = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).with_suffix("").parts
        is_package = name[-1] == "__init__"
        name = name[:-1] if is_package else name
        imports = _Imports(package.name, name, is_package=is_package)
        imports.visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
        modules[name] = imports.module
    return modules


# ----- circles -----


def _home(modules: Modules, item: Name) -> Name:
    """Returns the module that defines an item, following re-exports."""
    seen = set()
    while item not in seen:
        seen.add(item)
        module: Name = ()
        for part in item:
            if (*module, part) not in modules:
                break
            module = (*module, part)
        rest = item[len(module) :]
        if not rest or rest[0] not in modules[module].names:
            return module
        item = (*modules[module].names[rest[0]], *rest[1:])
    return module


Uses = dict[Name, dict[Name, set[str]]]
"""By module, its siblings that it or its children use, with the names used."""


def _uses_of_siblings(modules: Modules) -> Uses:
    uses: Uses = defaultdict(lambda: defaultdict(set))
    for name, module in modules.items():
        for item in module.used:
            home = _home(modules, item)
            shared = 0
            while shared < min(len(name), len(home)) and name[shared] == home[shared]:
                shared += 1
            if shared < min(len(name), len(home)):
                uses[name[: shared + 1]][home[: shared + 1]].add(item[-1])
    return uses


def _shortest_circle(uses: Uses, start: Name) -> list[Name]:
    """Returns the shortest path from a module through its siblings and back, or nothing."""
    ways = [[start]]
    seen: set[Name] = set()
    while ways:
        way = ways.pop(0)
        for other in sorted(uses.get(way[-1], ())):
            if other == start:
                return [*way, other]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


def circles(modules: Modules) -> list[str]:
    """Describes a shortest circle for every module in one, each circle once."""
    uses = _uses_of_siblings(modules)
    found: dict[frozenset[Name], str] = {}
    for module in sorted(uses):
        way = _shortest_circle(uses, module)
        if way:
            steps = [
                f"{here[-1]} uses {there[-1]} ({', '.join(sorted(uses[here][there]))})"
                for here, there in pairwise(way)
            ]
            where = "".join(f"{name}/" for name in module[:-1])
            found.setdefault(frozenset(way), f"{where}: {', '.join(steps)}".removeprefix(": "))
    return list(found.values())


def _modules(folder: Path) -> Modules:
    """Returns the modules of a crate with sources in `src`, or of a Python package."""
    source = folder / "src"
    return rust_modules(source) if source.is_dir() else python_modules(folder)


def violations(folders: Iterable[Path]) -> list[str]:
    """Lists the circular dependencies in these crates and Python packages."""
    found = []
    for folder in folders:
        modules = _modules(folder)
        if not modules:
            found.append(f"{folder.name} has no module: nothing was checked")
        found += [f"{folder.name}: {circle}" for circle in circles(modules)]
    return found


def folders_of(root: Path) -> list[Path]:
    """Returns the crates of the workspace at `root`, except test crates, and the Python package."""
    workspace = tomllib.loads((root / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]
    crates = [path for member in workspace["members"] for path in sorted(root.glob(member))]
    return [*(path for path in crates if (path / "src").is_dir()), root / "python" / "dcp_rs"]


# ----- self-test -----

# Files to write into a crate's src or a package, and the expected messages.
FORGED = [
    (
        {"lib.rs": "mod a;\nmod b;", "a.rs": "use crate::b::B;", "b.rs": "use super::a::A;"},
        "a uses b (B), b uses a (A)",
    ),
    (
        # A name re-exported by the root belongs to the module that defines it.
        {
            "lib.rs": "mod a;\nmod b;\npub use b::{C, B as D};",
            "a.rs": "use crate::{C, D};",
            "b.rs": "fn b() { crate::a::a(); }",
        },
        "a uses b (C, D), b uses a (a)",
    ),
    (
        # A child's dependencies count as its parent's.
        {
            "lib.rs": "mod a;\nmod b;\nmod c;",
            "a/mod.rs": "mod child;",
            "a/child.rs": "use super::super::b::{self, deep::B};",
            "b/mod.rs": "use crate::c::C;\nmod deep;",
            "b/deep.rs": "",
            "c.rs": "use crate::a;",
        },
        "a uses b (B, b), b uses c (C), c uses a (a)",
    ),
    (
        {"__init__.py": "", "a.py": "from dcp_rs.b import B", "b.py": "import dcp_rs.a"},
        "a uses b (B), b uses a (a)",
    ),
    (
        {
            "__init__.py": "from dcp_rs.a import A",
            "a.py": "def f():\n    from .b import B",
            "b.py": "from dcp_rs import A",
        },
        "a uses b (B), b uses a (A)",
    ),
    ({}, "has no module: nothing was checked"),
]

# These are allowed.
ALLOWED: list[dict[str, str]] = [
    {
        "lib.rs": "mod a;\nmod b;",
        "a.rs": "mod child;\nuse child::C;\n#[cfg(test)]\nmod tests { use crate::b::B; }",
        "a/child.rs": 'use super::A;\n// use crate::b::B;\nconst C: &str = "crate::b::B";',
        "b.rs": "use crate::a::A;\n#[cfg(test)]\nmod tests;",
        "b/tests.rs": "use crate::b::B;",
    },
    {
        "__init__.py": "",
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dcp_rs.b import B",
        "b.py": "from dcp_rs.a import A",
    },
]


def _found_in(files: dict[str, str]) -> list[str]:
    """Lists the circular dependencies in a crate, or package, of these files."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dcp_rs"
        package.mkdir()
        for name, source in files.items():
            path = (package / "src" if name.endswith(".rs") else package) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        return violations([package])


def _misjudged() -> list[str]:
    """Lists generated circles that are not detected, and false positives."""
    wrong = [
        f"went unnoticed: {expected}"
        for files, expected in FORGED
        if not any(found.endswith(expected) for found in _found_in(files))
    ]
    return wrong + [f"is no circle: {found}" for files in ALLOWED for found in _found_in(files)]


def main(arguments: list[str]) -> int:
    """Prints all problems, one per line; returns the exit code."""
    if arguments == ["--self-test"]:
        wrong = _misjudged()
        done = f"{len(FORGED)} forged circles noticed"
    else:
        folders = folders_of(ROOT)
        wrong = violations(folders)
        done = f"no circles in {len(folders) - 1} crates and python/dcp_rs"
    for line in wrong:
        print(f"circles: {line}", file=sys.stderr)
    if not wrong:
        print(f"circles: {done}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
