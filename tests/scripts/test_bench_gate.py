"""The gate of the benchmarks, which must not let a change of 3 % through, nor stop one of 1 %."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("bench_gate", ROOT / "scripts" / "bench_gate.py")
bench_gate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench_gate)


@pytest.mark.parametrize("now", [99.0, 100.0, 101.9])
def test_what_is_nearly_the_same_passes(now):
    assert bench_gate.differences({"decode": 100.0}, {"decode": now}) == []


@pytest.mark.parametrize("now", [97.0, 103.0])
def test_more_and_fewer_instructions_are_told(now):
    (difference,) = bench_gate.differences({"decode": 100.0}, {"decode": now})
    assert difference == f"decode: {now} instructions instead of 100.0"


def test_a_new_part_needs_a_baseline():
    assert bench_gate.differences({}, {"decode": 1.0}) == ["decode: not in the baseline"]
