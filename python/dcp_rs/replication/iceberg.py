"""Iceberg: a log, with a snapshot for each commit that names the document of its state."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar

from dcp_rs._libraries import require
from dcp_rs._logging import about
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication import iceberg_states as states
from dcp_rs.replication.iceberg_attempt import Attempt, Unsettled
from dcp_rs.replication.iceberg_catalogs import CUT, NO_TABLES, catalog_of
from dcp_rs.replication.iceberg_rules import (
    as_iceberg,
    check_table,
    is_promotion,
    missing,
    refuse_lost_nulls,
    schema_with,
)
from dcp_rs.replication.outage import is_passing
from dcp_rs.replication.rejects import SCHEMA, SUFFIX, name_taken
from dcp_rs.replication.storage import trying
from dcp_rs.replication.target import make_folder, overtaken, refuse_variants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pyarrow as pa

    from dcp_rs.replication.state import Mode, State
    from dcp_rs.replication.storage import Storage
    from dcp_rs.replication.target import Address, Commit

# Property of a table of rejects.
_REJECTS = "dcp_rs.rejects"
# Database with the catalog of a folder.
_CATALOG = "catalog.db"


# Seconds to wait before each further attempt at a commit that the storage has failed.
_PAUSES = (0.2, 1.0, 5.0, 0.0)
_log = logging.getLogger("dcp_rs.replication")


class IcebergTarget:
    """An Iceberg table, to which a log is appended.

    Each commit is a snapshot. Its summary names the document in the folder `_dcp_rs` of the table
    that holds the state, and that was written before.

    Args:
        catalog: Catalog of pyiceberg, as `pyiceberg.catalog.load_catalog` gives it.
        table: Name of the table with its namespace, as `namespace.table`; created if it does not
            exist.
        place: Where the catalog is, for errors.
    """

    modes: ClassVar[frozenset[Mode]] = frozenset({"log"})
    why_not: ClassVar[dict[Mode, str]] = NO_TABLES
    takes_rejects: ClassVar[bool] = True

    def __init__(self, catalog: Any, table: str, place: Storage | None = None) -> None:
        require("an Iceberg target", "pyiceberg", "iceberg")
        self._catalog = catalog
        self._name = table
        # Of a catalog that is opened, and may be created, with the table.
        self._folder: Path | None = None
        self._place = place
        self._table: Any = None
        self._rejects: Any = None
        self._schema: Any = None
        self._commits = 0

    @classmethod
    def at(cls, address: Address) -> IcebergTarget:
        """Creates the target for `iceberg:///folder?table=namespace.name`.

        The folder holds the tables, and `catalog.db`, an SQLite database, the catalog. With
        `iceberg://name?table=namespace.name`, pyiceberg's configuration says where the catalog of
        this name is, and with `iceberg+https://host/path?table=namespace.name` the URL. The table
        is `default.changes` if not given.

        Raises:
            ConfigError: There is no folder, no namespace, or another option; the folder or the
                table has a name that pyiceberg would cut; or the catalog does not answer.
            ImportError: pyiceberg is not installed.
        """
        address.allow("table", "catalog")
        table = address.options.get("table", "default.changes")
        _check_name(table)
        catalog, folder, place = catalog_of(address)
        target = cls(catalog, table, place)
        target._folder = folder
        return target

    def open(self, schema: pa.Schema, mode: Mode) -> State | None:  # noqa: ARG002 - a log only
        """See `dcp_rs.replication.Target.open`."""
        refuse_variants(schema, "pyiceberg")
        refuse_lost_nulls(schema)
        self._schema = as_iceberg(schema)
        return trying(self._place, lambda: self._open(schema))

    def _open(self, schema: pa.Schema) -> State | None:
        with contextlib.ExitStack() as undone:
            if self._folder is not None:
                self._catalog = _open_folder(self._folder, undone)
            self._rejects = self._find_rejects()
            self._table = self._find(self._name)
            state = None
            if self._table is None:
                self._create(undone)
            else:
                state = self._open_table(schema)
            undone.pop_all()
        self._commits = 0 if state is None else state.commits
        self._remove_rejects(state)
        states.forget(self._table, self._commits)
        return state

    def stored(self) -> State | None:
        """See `dcp_rs.replication.GrowingTarget.stored`."""
        catalog = self._catalog
        if self._folder is not None:
            if not (self._folder / _CATALOG).exists():
                return None
            with contextlib.ExitStack() as undone:
                self._catalog = _open_folder(self._folder, undone)
                undone.pop_all()
        try:
            return trying(self._place, self._load)
        finally:
            if self._folder is not None:
                self._catalog.engine.dispose()
                self._catalog = catalog

    def _load(self) -> State | None:
        found = self._find(self._name)
        return None if found is None else states.load(found)

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """See `dcp_rs.replication.GrowingTarget.widens`."""
        return is_promotion(old, new)

    def _find(self, name: str) -> Any:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return self._catalog.load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def _find_rejects(self) -> Any:
        """Returns the table of rejects; `None` if there is none."""
        base = self._name.removesuffix(SUFFIX)
        other = None if base == self._name else self._find(base)
        if other is not None and {states.NEWEST, states.OLD} & set(other.properties):
            raise ConfigError(
                f"table {self._name} is where the rejects of {base} go: use another",
                option="target",
            )
        found = self._find(self._name + SUFFIX)
        if found is not None and _REJECTS not in found.properties:
            raise name_taken(self._name + SUFFIX)
        return found

    def _create(self, undone: contextlib.ExitStack) -> None:
        namespace, _, name = self._name.rpartition(".")
        if "/" in self._name:
            raise ConfigError(
                f"table {name!r} of namespace {namespace!r} has a /, and would be in the"
                " folder of another table: use another name",
                option="target",
            )
        if not self._catalog.namespace_exists(namespace):
            self._catalog.create_namespace(namespace)
            undone.callback(_drop_namespace, self._catalog, namespace)
        self._table = self._catalog.create_table(self._name, self._schema)

    def _open_table(self, schema: pa.Schema) -> State | None:
        if _REJECTS in self._table.properties:
            raise ConfigError(f"table {self._name} is one of rejects: use another", option="target")
        self._schema = check_table(self._table, self._name, schema)
        added = missing(self._table, self._name, self._schema)
        state = states.load(self._table)
        if state is None and self._table.current_snapshot() is not None:
            raise ConfigError(
                f"table {self._name} has rows that dcp_rs did not write: use another",
                option="target",
            )
        if added:
            with self._table.update_schema() as update:
                update.union_by_name(self._schema)
        return state

    def commit(self, commit: Commit) -> None:
        """See `dcp_rs.replication.Target.commit`."""
        if commit.state.commits != self._commits + 1:
            raise overtaken(self._name)
        has_rejects = bool(len(commit.rejects))
        for pause in _PAUSES:
            try:
                if has_rejects:
                    self._write_rejects(commit)
                    has_rejects = False
                self._write(commit)
            except Exception as error:
                if not pause or not self._may_try_again(error):
                    raise
                _log.warning(
                    "a commit to %s is tried again: %s",
                    self._name,
                    error,
                    extra=about("commit_retried", table=self._name, error=str(error)),
                )
                time.sleep(pause)
            else:
                return

    def _may_try_again(self, error: Exception) -> bool:
        """Whether an attempt came to nothing by what may pass, and has removed its files."""
        if self._place is None or isinstance(error, Unsettled):
            return False
        return isinstance(error.__cause__, OSError) or is_passing(error)

    def _write(self, commit: Commit) -> None:
        document = states.new_document(self._table, commit.state.commits)
        summary = states.summary(commit.state, document)
        properties = states.newest(self._table, document, len(commit.rows))
        count = len(self._table.metadata.snapshots)
        if commit.schema is not None:
            required = {each.name for each in self._schema if not each.nullable}
            self._schema = schema_with(commit.schema, required)

        def write(transaction: Any) -> None:
            states.write(self._table, document, commit.state)
            if commit.schema is not None:
                with transaction.update_schema() as update:
                    update.union_by_name(self._schema)
            # Without rows too: the snapshot asserts that the table is the one that was loaded.
            rows = commit.rows.cast(self._schema)
            transaction.append(rows, snapshot_properties=summary)
            transaction.set_properties(properties)
            if states.OLD in self._table.properties:
                transaction.remove_properties(states.OLD)

        Attempt(self._catalog, self._table, self._name, document).run(write)
        self._commits = commit.state.commits
        if len(self._table.metadata.snapshots) != count + 1:
            states.forget(self._table, self._commits)

    # ----- rejects -----

    def _write_rejects(self, commit: Commit) -> None:
        """Appends rejects, unless the commit would fail since another has written."""
        document = states.new_document(self._table, commit.state.commits)
        summary = states.summary(commit.state, document)
        found = self._find(self._name)
        if found is None or _current(found) != _current(self._table):
            raise overtaken(self._name)
        # Somebody may have compacted it, or made another one, since it was opened.
        self._rejects = self._find_rejects()
        name, schema = self._name + SUFFIX, as_iceberg(SCHEMA)
        if self._rejects is None:
            self._rejects = self._catalog.create_table(name, schema, properties={_REJECTS: "true"})
        rows = commit.rejects.cast(schema)
        Attempt(self._catalog, self._rejects, name, document).run(
            lambda transaction: transaction.append(rows, snapshot_properties=summary)
        )

    def _remove_rejects(self, state: State | None) -> None:
        """Removes the rejects of commits that came to nothing, or that a rollback took back."""
        if self._rejects is None or self._rejects.current_snapshot() is None:
            return
        commits = (
            states.noted(each).get(states.COMMIT) for each in states.ancestors(self._rejects)
        )
        newest = next((int(each) for each in commits if each is not None), None)
        if newest is not None and newest <= self._commits:
            return
        rows = self._rejects.scan().to_arrow()
        kept = _up_to(rows, state)
        document = states.new_document(self._rejects, self._commits)
        summary = {states.COMMIT: str(self._commits), states.DOCUMENT: document}
        Attempt(self._catalog, self._rejects, self._name + SUFFIX, document).run(
            lambda transaction: transaction.overwrite(kept, snapshot_properties=summary)
        )

    def drop(self) -> None:
        """Removes the table, its state and its rejects."""
        if self._rejects is not None:
            self._catalog.purge_table(self._name + SUFFIX)
        self._catalog.purge_table(self._name)
        self._table = self._rejects = None

    def close(self) -> None:
        """Forgets the table; closes a catalog that it opened."""
        self._table = self._rejects = None
        if self._folder is not None and self._catalog is not None:
            self._catalog.engine.dispose()
            self._catalog = None

    def __repr__(self) -> str:
        return f"IcebergTarget({self._name!r})"


class IcebergDatabase:
    """An Iceberg catalog with several logs, which are written one after the other.

    Args:
        catalog: Catalog of pyiceberg; `None` for that of a folder.
        folder: The folder, which holds the tables, and `catalog.db`, the catalog.
    """

    modes: ClassVar[frozenset[Mode]] = IcebergTarget.modes
    why_not: ClassVar[dict[Mode, str]] = NO_TABLES
    takes_rejects: ClassVar[bool] = True

    def __init__(
        self, catalog: Any, folder: Path | None = None, place: Storage | None = None
    ) -> None:
        self._catalog = catalog
        self._folder = folder
        self._place = place

    @classmethod
    def at(cls, address: Address) -> IcebergDatabase:
        """Creates the database for `iceberg:///folder` or `iceberg://name`.

        Raises:
            ConfigError: There is an option, or the catalog or the folder is wrong.
            ImportError: pyiceberg is not installed.
        """
        address.allow("catalog")
        return cls(*catalog_of(address))

    def open(self) -> dict[str, str]:
        """See `dcp_rs.replication.Database.open`."""
        if self._folder is not None:
            with contextlib.ExitStack() as undone:
                self._catalog = _open_folder(self._folder, undone)
                undone.pop_all()
        return trying(self._place, self._collections)

    def _collections(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for namespace in self._catalog.list_namespaces():
            for identifier in self._catalog.list_tables(namespace):
                table = self._catalog.load_table(identifier)
                if not {states.NEWEST, states.OLD} & set(table.properties):
                    continue
                state = states.load(table)
                if state is not None and state.collection is not None:
                    found[".".join(identifier)] = state.collection
        return found

    def target(self, table: str) -> IcebergTarget:
        """See `dcp_rs.replication.Database.target`."""
        name = self.fold(table)
        _check_name(name)
        return IcebergTarget(self._catalog, name, self._place)

    def fold(self, table: str) -> str:
        """See `dcp_rs.replication.Database.fold`."""
        return table if "." in table else f"default.{table}"

    def commit(self, commits: Sequence[tuple[IcebergTarget, Commit]]) -> list[Commit | None]:
        """See `dcp_rs.replication.Database.commit`."""
        for target, commit in commits:
            target.commit(commit)
        return [None] * len(commits)

    def drop(self, target: IcebergTarget) -> None:
        """See `dcp_rs.replication.Database.drop`."""
        target.drop()

    def close(self) -> None:
        """Closes a catalog that it opened."""
        if self._folder is not None and self._catalog is not None:
            self._catalog.engine.dispose()
            self._catalog = None

    def __repr__(self) -> str:
        return f"IcebergDatabase({str(self._folder)!r})"


def _current(table: Any) -> int | None:
    snapshot = table.current_snapshot()
    return None if snapshot is None else int(snapshot.snapshot_id)


def _check_name(table: str) -> None:
    parts = table.split(".")
    if not all(part.strip() for part in parts) or len(parts) < 2:
        raise ConfigError(
            f"table {table!r} needs a namespace, as in default.{table}", option="target"
        )
    if any(part != part.strip() for part in parts[:-1]) or CUT.search(table):
        raise ConfigError(
            f"table {table!r} has a #, ?, control character, or space around a namespace,"
            " which pyiceberg would leave out: use another name",
            option="target",
        )


def _open_folder(folder: Path, undone: contextlib.ExitStack) -> Any:
    """Opens the catalog of a folder, which it creates; `undone` removes what was not there."""
    from pyiceberg.catalog.sql import SqlCatalog
    from sqlalchemy.exc import SQLAlchemyError

    database = folder / _CATALOG
    for each in (*reversed(folder.parents), folder):
        if not os.path.lexists(each):
            undone.callback(_remove, each.rmdir)
    if not os.path.lexists(database):
        undone.callback(_remove, database.unlink)
    make_folder(folder)
    try:
        catalog = SqlCatalog("dcp_rs", uri=f"sqlite:///{database}", warehouse=f"file://{folder}")
    except SQLAlchemyError as error:
        raise ConfigError(f"{database} cannot be opened: {error}", option="target") from error
    undone.callback(catalog.engine.dispose)
    return catalog


def _drop_namespace(catalog: Any, namespace: str) -> None:
    """Drops a namespace that was created, unless another process has used it since."""
    from pyiceberg.exceptions import NamespaceNotEmptyError, NoSuchNamespaceError

    with contextlib.suppress(NamespaceNotEmptyError, NoSuchNamespaceError):
        catalog.drop_namespace(namespace)


def _remove(remove: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        remove()


def _up_to(rejects: pa.Table, state: State | None) -> pa.Table:
    """Returns the rejects that a state has behind it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if state is None:
        return rejects.slice(0, 0)
    positions = state.checkpoint.positions
    count = max(positions, default=-1) + 1
    at = [positions.get(vbucket) for vbucket in range(count)]
    epochs = pa.array([-1 if each is None else each.epoch for each in at] + [-1], pa.int64())
    seqnos = pa.array([-1 if each is None else each.seqno for each in at] + [-1], pa.int64())
    place = pc.min_element_wise(rejects["vbucket"], count).combine_chunks()
    epoch, seqno = epochs.take(place), seqnos.take(place)
    is_read = pc.or_(
        pc.less(rejects["epoch"], epoch),
        pc.and_(pc.equal(rejects["epoch"], epoch), pc.less_equal(rejects["seqno"], seqno)),
    )
    is_older = pc.less(rejects["generation"], state.generation)
    is_same = pc.equal(rejects["generation"], state.generation)
    return rejects.filter(pc.or_(is_older, pc.and_(is_same, is_read)))
