"""`dcp-rs export`: write a bucket's changes up to now to a file."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

from dcp_rs._libraries import require_pyarrow
from dcp_rs.cli._options import command, connection_options, file_name, reading_options, resume_from
from dcp_rs.cli._output import Reporter, write
from dcp_rs.cli._rows import JsonLines
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError
from dcp_rs.stores import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from dcp_rs.batch import ChangeBatch
    from dcp_rs.connection import ConnectionOptions
    from dcp_rs.stream import ChangeStream

_ENDINGS = {
    ".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip

# Size of a Parquet row group.
_GROUP_ROWS = 1 << 18
_GROUP_BYTES = 64 * 1024 * 1024


@command()
@connection_options
@click.argument("file", metavar="FILE")
@click.option(
    "--format",
    "form",
    type=click.Choice(sorted(set(_ENDINGS.values()))),
    help="Format, if the extension of FILE does not determine it.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--checkpoint",
    metavar="STORE",
    type=file_name,
    help="Resume from the checkpoint in the file STORE, if it exists, and keep it up to date.",
)
@reading_options()
def export(
    connection: ConnectionOptions,
    file: str,
    form: str | None,
    checkpoint: str | None,
    reading: dict[str, Any],
    *,
    force: bool,
) -> None:
    """Write a bucket's changes up to now to a file.

    The extension of FILE selects the format: .parquet, .csv, .jsonl or .arrow (Arrow IPC). - is
    standard output. FILE appears only when it is complete and synced. Progress goes to standard
    error.
    """
    form = form or _ENDINGS.get(Path(file).suffix.lower())
    if form is None:
        raise click.UsageError(
            f"the extension of FILE is none of {', '.join(_ENDINGS)}: pass the format with --format"
        )
    target = None if file == "-" else _target(file, force=force)
    if form != "jsonl":
        # Before anything is written: Ctrl-C during an import ends Python by the signal.
        _import_arrow(form)
    store = None if checkpoint is None else FileStore(checkpoint)
    if store is not None:
        resume_from(store, reading)
    with Client(connection) as client, client.stream(until="now", **reading) as stream:
        with _appearing(target, force=force) as output:
            _write(stream, form, output)
        if store is not None:
            store.save(stream.checkpoint())


def _target(file: str, *, force: bool) -> Path:
    """Returns the file to create or replace."""
    path = Path(file)
    # It is renamed to, which would put a file in the place of a device or a pipe.
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{file!r} is not a regular file: to write to a device or a pipe, use - and redirect"
            " standard output",
            option="FILE",
        )
    if os.path.lexists(path) and not force:
        raise _exists(file)
    # A symbolic link stays one.
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise ConfigError(
            f"the folder {path.parent} does not exist: create it first", option="FILE"
        )
    return path


@contextlib.contextmanager
def _appearing(path: Path | None, *, force: bool) -> Iterator[IO[bytes]]:
    """Opens a file that is renamed once it is complete, and removed on failure."""
    if path is None:
        yield sys.stdout.buffer
        write((), durably=True)
        return
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with hidden.open("xb") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        _publish(hidden, path, force=force)
        _sync_folder(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _publish(hidden: Path, path: Path, *, force: bool) -> None:
    if not force:
        # Unlike a rename, a link fails if the file was created meanwhile.
        try:
            path.hardlink_to(hidden)
        except FileExistsError:
            raise _exists(path) from None
        except OSError:
            # Not every file system has links.
            if os.path.lexists(path):
                raise _exists(path) from None
        else:
            hidden.unlink()
            return
    hidden.replace(path)


def _exists(file: str | Path) -> ConfigError:
    return ConfigError(f"{file} already exists: use --force to overwrite it", option="FILE")


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(stream: ChangeStream, form: str, output: IO[bytes]) -> None:
    reporter = Reporter()
    begun = time.monotonic()
    rows = size = 0

    def told() -> str:
        seconds = max(time.monotonic() - begun, 1e-3)
        return (
            f"dcp-rs: {rows:,} changes, {size / 1e6:,.1f} MB as Arrow, {rows / seconds:,.0f}/s,"
            f" {seconds:.1f} s"
        )

    try:
        with _writer(form, stream, output) as writer:
            for batch in stream:
                writer.write(batch)
                rows += len(batch)
                size += batch.nbytes
                if reporter.is_due():
                    reporter.show(told())
        reporter.finish(told())
    finally:
        reporter.close()


class _Writer(Protocol):
    def write(self, batch: ChangeBatch) -> None: ...


@contextlib.contextmanager
def _writer(form: str, stream: ChangeStream, output: IO[bytes]) -> Iterator[_Writer]:
    if form == "jsonl":
        yield _JsonLinesWriter(stream, output)
        return
    pa = _import_arrow(form)
    if form == "parquet":
        with pa.parquet.ParquetWriter(output, stream.schema, compression="zstd") as file:
            groups = _Groups(pa, file)
            yield groups
            groups.flush()
        return
    with _open_plain(pa, form, stream, output) as file:
        yield _BatchWriter(pa, file)


def _import_arrow(form: str) -> Any:
    """Imports pyarrow, and the part of it that writes the format."""
    try:
        pa = require_pyarrow(f"export to {form}")
    except ImportError as error:
        raise ImportError(
            f'{error}, or with the command line: pip install "dcp-rs[cli,arrow]"'
        ) from error
    if form == "parquet":
        import pyarrow.parquet
    elif form == "csv":
        import pyarrow.csv  # noqa: F401 - an attribute of pyarrow
    return pa


def _open_plain(pa: Any, form: str, stream: ChangeStream, output: IO[bytes]) -> Any:
    if form == "arrow":
        return pa.ipc.new_file(output, stream.schema)
    nested = [field.name for field in stream.schema if pa.types.is_nested(field.type)]
    if nested:
        raise ConfigError(
            f"CSV files have no nested columns ({', '.join(nested)}): choose others with"
            " --columns, or another format",
            option="format",
        )
    return pa.csv.CSVWriter(output, stream.schema)


class _JsonLinesWriter:
    """Writes a JSON object for each change, as `cat --json` does."""

    def __init__(self, stream: ChangeStream, output: IO[bytes]) -> None:
        self._lines = JsonLines(stream.column_names)
        self._output = output

    def write(self, batch: ChangeBatch) -> None:
        self._output.writelines(self._lines.of(batch.tuples()))


class _BatchWriter:
    """Writes batches as they are."""

    def __init__(self, pa: Any, file: Any) -> None:
        self._pa, self._file = pa, file

    def write(self, batch: ChangeBatch) -> None:
        try:
            self._file.write(self._pa.record_batch(batch))
        except self._pa.ArrowInvalid as error:
            raise ConfigError(
                "a key or document is not UTF-8, which CSV files must be: choose other"
                " columns with --columns, pass --value-format string to write null for such a"
                " document, or choose another format",
                option="format",
            ) from error


class _Groups:
    """Collects batches into row groups."""

    def __init__(self, pa: Any, file: Any) -> None:
        self._pa, self._file = pa, file
        self._batches: list[Any] = []
        self._rows = self._bytes = 0

    def write(self, batch: ChangeBatch) -> None:
        self._batches.append(self._pa.record_batch(batch))
        self._rows += len(batch)
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._batches:
            table = self._pa.Table.from_batches(self._batches)
            self._file.write_table(table, row_group_size=self._rows)
        self._batches, self._rows, self._bytes = [], 0, 0
