"""`--help` of every command, on a terminal of 80 columns."""

import dataclasses
import shlex

import click
import pytest

import dcp_rs
from dcp_rs.cli import _program


def commands(command=_program._program, path=()):
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


ALL = dict(commands())


def test_there_are_commands():
    assert {("cat",), ("show",), ("checkpoint", "show"), ("completion",)} < ALL.keys()


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_fits_the_terminal_and_has_no_marks_of_its_source(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert _program.run([*path, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Usage: {' '.join(('dcp-rs', *path))}")
    assert [line for line in lines if len(line) > 80] == []
    # A mark of click, and markup of docstrings.
    assert [line for line in lines if "\\b" in line or "\b" in line or "``" in line] == []
    assert not any("<=" in line for line in lines), "a range that no one needs to know"


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_what_a_command_does_comes_before_how_it_connects(path, capsys):
    assert _program.run([*path, "--help"]) == 0
    own, _, connecting = capsys.readouterr().out.partition("\nConnection options:\n")
    options = {
        option for each in ALL[path].params if isinstance(each, click.Option) and not each.hidden
        for option in each.opts if option.startswith("--")
    }  # fmt: skip
    assert bool(connecting) == ("--network" in options)
    of_connection = {each.name for each in dataclasses.fields(dcp_rs.ConnectionOptions)}
    for option in options:
        name = option.removeprefix("--").replace("-", "_")
        connects = name.removesuffix("_env") in of_connection and connecting
        assert f" {option} " in (connecting if connects else own).replace("\n", " "), option


@pytest.mark.parametrize(
    "path", [path for path, each in ALL.items() if not hasattr(each, "commands")], ids=" ".join
)
def test_a_command_has_two_examples_that_it_takes(path, capsys):
    assert _program.run([*path, "--help"]) == 0
    shown = capsys.readouterr().out.partition("\n  Examples:\n")[2]
    lines = shown.replace("\\\n", "").splitlines()
    assert len(lines) == 2
    for line in lines:
        _, *arguments = shlex.split(line.partition(" > ")[0])
        assert tuple(arguments[: len(path)]) == path
        # Without what they do, such as reading a file that is not here.
        parser = ALL[path].make_parser(click.Context(ALL[path]))
        _, unknown, _ = parser.parse_args(arguments[len(path) :])
        assert not unknown


def test_the_targets_of_a_replication_are_a_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert _program.run(["replicate", "--help"]) == 0
    shown = capsys.readouterr().out
    for scheme in ("duckdb", "postgresql", "delta", "parquet", "iceberg"):
        assert f"\n    {scheme}://" in shown


def test_every_option_is_explained():
    for path, command in ALL.items():
        for each in command.params:
            if isinstance(each, click.Option) and not each.hidden:
                assert each.help, (path, each.name)
