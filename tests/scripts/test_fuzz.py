"""The runner of fuzz targets: what it takes for a finding, and what it keeps of a corpus."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts" / "fuzz.py")
fuzz = importlib.util.module_from_spec(SPEC)
sys.modules["fuzz"] = fuzz
SPEC.loader.exec_module(fuzz)

DONE = """echo "Done 1234 runs in 7 second(s)" >&2
echo "stat::number_of_executed_units: 1234" >&2
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder of programs that say what libFuzzer says, made of scripts."""
    monkeypatch.setattr(fuzz, "STATE", tmp_path / "state")

    def put(target, script):
        program = tmp_path / target
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return tmp_path

    return put


def test_a_run_is_counted(programs):
    outcome = fuzz.play(programs("framing", DONE), "framing", 1, [])
    assert (outcome.executions, outcome.seconds, outcome.failed) == (1234, 7, False)
    run = fuzz.run_of(outcome, "abc", "none")
    assert list(run.values())[1:] == ["framing", 1234, 7, "abc", "none", 0]


def test_a_program_that_fails_is_a_finding_whatever_it_prints(programs):
    outcome = fuzz.play(programs("framing", DONE + "exit 77"), "framing", 1, [])
    assert outcome.failed
    run = fuzz.run_of(outcome, "abc", "address")
    assert (run["sanitizer"], run["findings"]) == ("address", 1)


def test_runs_are_summed_by_target_and_sanitizer():
    rows = [("framing", 1234, "none"), ("framing", 1, "address"), ("sasl", 5, "none")]
    outcomes = [(fuzz.Outcome(target, count, 7, False, ""), how) for target, count, how in rows]
    runs = [fuzz.run_of(outcome, "abc-dirty", how) for outcome, how in outcomes]
    page = fuzz.with_sums(f"Before\n\n{fuzz.SUMS}\nAfter\n", runs)
    assert "| framing | 1,235, 1 of them under AddressSanitizer |\n" in page
    assert "| sasl | 5 |\n" in page
    assert page.startswith(f"Before\n\n{fuzz.SUMS}| framing |")
    assert page.endswith("|\n\nAfter\n")
    assert fuzz.with_sums(page, runs) == page


def test_the_page_has_the_sums_of_the_runs():
    page, runs = fuzz.PAGE.read_text(), fuzz.kept_runs()
    assert len(runs) > 30
    assert fuzz.with_sums(page, runs) == page
    assert page.count("\n| framing | ") == 1


def test_a_corpus_keeps_inputs_of_all_lengths_within_its_bounds(tmp_path):
    merged, corpus = tmp_path / "merged", tmp_path / "corpus"
    merged.mkdir()
    for length in range(1, 1001):
        (merged / f"{length:04}").write_bytes(b"x" * length)
    fuzz.keep(merged, corpus)
    lengths = [path.stat().st_size for path in corpus.iterdir()]
    assert len(lengths) <= fuzz.CORPUS_FILES
    assert sum(lengths) <= fuzz.CORPUS_BYTES
    assert min(lengths) < 50
    assert max(lengths) > 900


def test_the_archive_is_what_packing_its_inputs_gives(tmp_path):
    fuzz.unpack(fuzz.ARCHIVE, tmp_path / "corpora")
    fuzz.pack(tmp_path / "corpora", tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == fuzz.ARCHIVE.read_bytes()
    corpora = {path.name: list(path.iterdir()) for path in (tmp_path / "corpora").iterdir()}
    assert corpora.keys() == fuzz.MAX_LEN.keys()
    assert all(len(inputs) >= 10 for inputs in corpora.values())


def test_every_target_of_the_crate_is_run():
    source = (ROOT / "tests" / "fuzz" / "src" / "lib.rs").read_text()
    assert all(f'("{target}", {target})' in source for target in fuzz.MAX_LEN)
    assert source.count('    ("') == len(fuzz.MAX_LEN)
