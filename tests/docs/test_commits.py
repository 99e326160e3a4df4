"""The commits that pages name, which say what a figure was measured on, are in the history."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The output of programs has numbers in hex that are none; rustc has a commit of its own.
NAME = re.compile(r"(?:\bcommit |`|\"commit\": \")`?([0-9a-f]{40}|[0-9a-f]{7,12})\b")


def git(folder, *arguments):
    """Runs git; returns what it prints, `None` if it fails."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    return None if done.returncode else done.stdout.strip()


def named(folder):
    """Returns each commit that a page names, with the page."""
    files = [*(folder / "docs").rglob("*.md"), *(folder / "docs").glob("*.json")]
    for page in [*folder.glob("CHANGELOG.md"), *sorted(files)]:
        for name in sorted(set(NAME.findall(page.read_text()))):
            yield name, str(page.relative_to(folder))


def missing(folder):
    """Returns the commits that are not in the history, as far as there is one to see."""
    # Neither a source distribution, which may lie in a repository of something else, nor a clone
    # without the commits of before.
    is_top = git(folder, "rev-parse", "--show-prefix") == ""
    if not is_top or git(folder, "rev-parse", "--is-shallow-repository") != "false":
        return []
    return [
        f"{page}: {name}"
        for name, page in named(folder)
        if git(folder, "merge-base", "--is-ancestor", name, "HEAD") is None
    ]


def test_every_commit_that_a_page_names_is_in_the_history():
    assert len(list(named(ROOT))) > 10
    assert missing(ROOT) == []


@pytest.fixture
def history(tmp_path):
    """Makes a repository whose page names its first commit, and one that it does not have."""
    folder = tmp_path / "whole"
    (folder / "docs").mkdir(parents=True)
    git(folder, "init", "--quiet")

    def commit():
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        git(folder, "add", "docs")
        git(folder, *identity, "commit", "--quiet", "--allow-empty", "--message", "a commit")
        return git(folder, "rev-parse", "HEAD")

    first = commit()
    page = f"rustc 1.95.0 (59807616e 2026-04-14), commit {first[:10]}, then `0123abc`.\n"
    (folder / "docs" / "page.md").write_text(page)
    commit()
    return folder


def test_a_commit_that_is_not_in_the_history_is_noticed(history):
    assert missing(history) == ["docs/page.md: 0123abc"]
    # Nor is one of a branch that was left.
    git(history, "branch", "left")
    git(history, "reset", "--quiet", "--soft", "HEAD~")
    left = git(history, "rev-parse", "left")
    (history / "docs" / "page.md").write_text(f"Measured on commit `{left}`.\n")
    assert missing(history) == [f"docs/page.md: {left}"]


def test_without_the_whole_history_no_commit_is_missed(history, tmp_path):
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", history.as_uri(), str(shallow))
    assert len(list(named(shallow))) == 2
    assert missing(shallow) == []
    assert git(shallow, "fetch", "--quiet", "--unshallow") is not None
    assert missing(shallow) == ["docs/page.md: 0123abc"]
    plain = tmp_path / "plain"
    history.rename(plain)
    (plain / ".git").rename(tmp_path / "gone")
    assert len(list(named(plain))) == 2
    assert missing(plain) == []
