"""What the mutants of the parsers and machines are counted as."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import mutants


def outcomes(caught, missed, timeout=0, unviable=0):
    kinds = {"CaughtMutant": caught, "MissedMutant": missed, "Timeout": timeout}
    kinds["Unviable"] = unviable
    return [
        {"summary": kind, "scenario": {"Mutant": {"name": f"{kind} {number}"}}}
        for kind, count in kinds.items()
        for number in range(count)
    ]


def test_too_few_are_caught_below_92_percent(capsys):
    assert mutants.report("dcp-wire", outcomes(92, 8), is_share=False)
    assert not mutants.report("dcp-wire", outcomes(91, 9), is_share=False)
    assert "dcp-wire: 91 of 100 mutants caught (91.0%)\n" in capsys.readouterr().out


def test_timeouts_are_caught_and_what_does_not_compile_does_not_count(capsys):
    assert mutants.report("dcp-wire", outcomes(90, 2, timeout=2, unviable=50), is_share=False)
    first, *missed = capsys.readouterr().out.splitlines()
    assert first == (
        "dcp-wire: 92 of 94 mutants caught (97.9%), 2 of them by a timeout; 50 more do not compile"
    )
    assert missed == ["  missed: MissedMutant 0", "  missed: MissedMutant 1"]


def test_a_share_is_not_reported_as_the_whole(capsys):
    assert mutants.report("dcp-wire", outcomes(100, 0), is_share=True)
    assert capsys.readouterr().out.endswith("; at least 96% of all\n")
    mutants.report("dcp-wire", outcomes(95, 5), is_share=True)
    out = capsys.readouterr().out
    assert "; at least 88% of all\n" in out, "88.8 % is not yet 89 %"


@pytest.mark.parametrize(("caught", "tried", "least"), [(95, 100, 0.888), (950, 1000, 0.935)])
def test_wilson_s_interval(caught, tried, least):
    assert mutants.at_least(caught, tried) == pytest.approx(least, abs=0.001)


def test_no_mutants_prove_nothing(capsys):
    assert not mutants.report("dcp-wire", outcomes(0, 0, unviable=3), is_share=False)
    assert "no mutant was tried" in capsys.readouterr().out


def test_a_line_of_the_list_that_matches_nothing_is_outdated():
    names = ["src/key.rs:70:5: replace decode with None", "src/log.rs:1:1: replace a with b"]
    assert mutants.outdated(["key.rs.*decode", "gone"], names) == ["gone"]


def test_each_exception_has_its_reason():
    text = mutants.CONFIG.read_text()
    excluded = tomllib.loads(text)["exclude_re"]
    listed = text[text.index("exclude_re = [") :].splitlines()[1:]
    for line, before in zip(listed[1:], listed, strict=False):
        if line.lstrip().startswith(("'", '"')):
            assert before.lstrip().startswith(("#", "'", '"')), line
    assert all(re.compile(line) for line in excluded)
