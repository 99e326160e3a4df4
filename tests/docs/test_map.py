"""The map of the house leads to files and tests that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRATES = ROOT / "crates"
TABLE = CRATES / "dcp-proto/src/lib.rs"
FOLDERS = ("crates", "python", "tests", "scripts", "docs")


def rules(text):
    """Returns the files and the test of each rule of the table."""
    rows = [line for line in text.splitlines() if re.match(r"//! \| .* \| `\w+` \|$", line)]
    for row in rows:
        *_, files, test, _ = (cell.strip() for cell in row.split("|"))
        found = []
        for part in files.split(", "):
            name, _, crate = part.partition(" of ")
            found.append((crate.strip("`") if crate else "dcp-proto", name.strip("`")))
        yield found, test.strip("`")


def functions():
    """Returns the names of all functions of crates/, among which are the tests."""
    texts = (path.read_text() for path in CRATES.rglob("*.rs"))
    return {name for text in texts for name in re.findall(r"\bfn (\w+)", text)}


def wrong(text):
    """Returns what the table of rules names that is not there."""
    names = functions()
    for files, test in rules(text):
        for crate, file in files:
            if not (CRATES / crate / "src" / file).is_file():
                yield f"{crate}: {file}"
        if test not in names:
            yield test


def there(name):
    """Returns whether a file or a folder ends in this name."""
    name = name.rstrip("/")
    last = Path(name).name
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob(last))
    return (ROOT / name).exists() or any(f"/{path}".endswith(f"/{name}") for path in found)


def absent(page):
    """Returns the files and folders that a page names and that are not there."""
    for name in sorted(set(re.findall(r"`(\w[\w./-]*(?:\.rs|\.py|/))`", page))):
        if not there(name):
            yield name


def test_each_rule_of_the_protocol_has_its_file_and_its_test():
    text = TABLE.read_text()
    assert len(list(rules(text))) >= 25
    assert list(wrong(text)) == []


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    assert len(re.findall(r"`[\w./-]+\.(?:rs|py)`", text)) > 5
    assert list(absent(text)) == []


def test_a_file_or_a_test_that_is_not_there_is_noticed():
    row = "//! | a rule | `page` | `gone.rs` of `dcp-wire`, `lib.rs` | `no_such_test` |"
    assert list(wrong(row)) == ["dcp-wire: gone.rs", "no_such_test"]
    page = "`gone/` and `dcp-wire/src/gone.rs`, not `dcp-wire/src/lib.rs`"
    assert list(absent(page)) == ["dcp-wire/src/gone.rs", "gone/"]
