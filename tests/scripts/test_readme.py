"""The README's examples, run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_quickstart_and_what_follows_it_run(capsys, monkeypatch, tmp_path):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    quickstart, arrow, resume, *_ = blocks
    names = {}
    exec(quickstart, names)
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["mutation", "airline_10"] in printed
    assert ["deletion", "airline_11"] in printed
    exec(arrow, names)
    assert names["table"].num_rows == names["frame"].height == len(printed)
    assert names["frame"].columns == ["op", "key", "seqno"]
    monkeypatch.chdir(tmp_path)
    seen = []

    class EnoughError(Exception):
        pass

    def write(batch):
        seen.extend(row["key"] for row in batch.rows())
        if "stop" in seen:
            raise EnoughError
        names["cluster"].upsert("stop", {})

    for _ in range(2):
        with pytest.raises(EnoughError):
            exec(resume, names | {"write": write})
    assert sorted(seen) == ["airline_10", "airline_11", "stop", "stop"], "the last was not saved"
    names["client"].close()
    names["cluster"].close()


def test_every_target_that_is_mentioned_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    mentioned = set()
    for page in ("README.md", "CONTRIBUTING.md"):
        mentioned |= set(
            re.findall(r"(?:^ {4}|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE)
        )
    assert len(mentioned) >= 5
    assert mentioned <= targets


def test_every_link_between_the_pages_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    checked = 0
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            checked += 1
    assert checked > 8
