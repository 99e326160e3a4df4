"""Which tables a replication writes to, and which changes are for which."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Literal, Protocol

from dcp_rs._logging import about
from dcp_rs.exceptions import CheckpointError, ConfigError, DcpError
from dcp_rs.replication import changes as reducing
from dcp_rs.replication.controls import check_adds
from dcp_rs.replication.group import Group
from dcp_rs.replication.names import is_pattern, matches, qualified
from dcp_rs.replication.outage import is_unavailable
from dcp_rs.replication.reload import Reload
from dcp_rs.replication.sampling import sample
from dcp_rs.replication.waiting import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pyarrow as pa

    from dcp_rs.checkpoint import Checkpoint
    from dcp_rs.client import Client
    from dcp_rs.replication.changes import Layout
    from dcp_rs.replication.group import Buffer
    from dcp_rs.replication.names import TableNames
    from dcp_rs.replication.schemas import OwnSchema
    from dcp_rs.replication.state import State
    from dcp_rs.replication.table import Step, Table
    from dcp_rs.replication.target import Database, Target
    from dcp_rs.stream import ChangeStream

    Start = Checkpoint | Literal["earliest"]

    class Opening(Protocol):
        """Opens a stream."""

        def __call__(
            self, start: Start, collections: list[str] | None, *, fills: bool = True
        ) -> ChangeStream:
            """Opens a stream of collections from a position.

            Args:
                start: Where it begins.
                collections: Collections that it reads.
                fills: Whether no table has read some of a vBucket that it reads from the beginning.
            """


_log = logging.getLogger("dcp_rs.replication")

# Seqnos that a table may be behind the others and be read together with them.
_FAR = 100_000


class Tables(Protocol):
    """The tables of a replication."""

    layout: Layout
    """Which columns are read."""
    are_one: bool
    """Whether there is one table, whose position is committed even if it has no changes."""
    commits_when_idle: bool
    """Whether a commit of few rows is cheap."""

    def check(self, states: Mapping[str, State], client: Client) -> dict[str, str]:
        """Checks the states that a target has, without opening it.

        Args:
            states: By the names of their tables.
            client: Client of the bucket.

        Returns:
            Why tables would be loaded anew, by their names.

        Raises:
            ConfigError: The tables cannot be gone on with.
        """

    def groups(self, client: Client, buffer: Callable[[], Buffer]) -> list[Group]:
        """Opens the tables, grouped by the stream that each needs.

        The first group is joined by the others once they have caught up.
        """

    def stream(self, group: Group, client: Client, opening: Opening) -> ChangeStream | None:
        """Opens the stream of a group; `None` if there is nothing to read."""

    def to_load(self, client: Client, group: Group) -> dict[str | None, Table]:
        """Returns the tables of a group that have to be loaded, if others have not."""

    def added(self, client: Client, groups: Iterable[Group]) -> dict[str | None, Table]:
        """Returns tables of collections that exist, and that no stream reads."""

    def choose(
        self, collections: list[str] | None, client: Client, groups: Iterable[Group]
    ) -> dict[str | None, Table]:
        """Chooses other collections, and returns the tables of those that no group has.

        Raises:
            ConfigError: They lack one that was chosen, or one has no place; nothing has changed.
        """

    def route(
        self, parts: Mapping[int | None, Part], group: Group, groups: Iterable[Group]
    ) -> list[tuple[Table, Part]]:
        """Returns the changes of a group's stream by the tables that they are for.

        Args:
            parts: By the ID of their collection, `None` for those of vBuckets and scopes; or all
                under `None`, if the tables are one.
            group: The group.
            groups: All groups.
        """

    def collection_id(self, table: Table) -> int | None:
        """Returns the ID of the table's collection, if it had one when a stream was opened."""

    def commit(self, steps: list[tuple[Table, Step]]) -> None:
        """Commits to several tables; all at once if the target can."""

    def drop(self, group: Group) -> None:
        """Drops the tables of collections that were gone when the stream was opened."""

    def by_name(self, groups: Iterable[Group]) -> dict[str, Table]:
        """Returns the tables by their names, if there are several."""

    def forget_reload(self) -> None:
        """Forgets what was to be read again, since it has been."""

    def is_unavailable(self, error: Exception) -> bool:
        """Whether an error says that the target cannot be written to now."""

    def close(self) -> None:
        """Closes the target."""


class OneTable:
    """One table, log or history, which takes all changes.

    Args:
        table: The table.
        target: Its target.
        layout: Which columns are read.
        collections: Which collections are read.
        samples: Documents to read of each collection before columns are decided.
        reload: What the table reads again.
    """

    are_one = True

    def __init__(
        self,
        table: Table,
        target: Target,
        layout: Layout,
        collections: list[str] | None,
        *,
        samples: int,
        reload: Reload,
    ) -> None:
        self.layout = layout
        self._samples = samples
        self._reload = reload
        self._table = table
        self._target = target
        self.commits_when_idle = getattr(target, "commits_when_idle", False)
        self._collections = collections

    def check(self, states: Mapping[str, State], client: Client) -> dict[str, str]:
        """See `Tables`."""
        found = {
            name: self._table.check(state, client.bucket_uuid) for name, state in states.items()
        }
        return {name: why for name, why in found.items() if why is not None}

    def groups(self, client: Client, buffer: Callable[[], Buffer]) -> list[Group]:
        """See `Tables`."""
        self._table.restore()
        schema = self._table.undecided
        if schema is not None:
            ids = client.collections(self._collections)
            _decide(client, ids, dict.fromkeys(ids, schema), self._samples)
        self._table.open()
        if self._reload.by_collection:
            raise ConfigError(
                "names a collection, and there is one table for all: give vBuckets",
                option="reload",
            )
        self._reload.apply([self._table])
        return [Group({None: self._table}, self._collections, buffer())]

    def stream(self, group: Group, client: Client, opening: Opening) -> ChangeStream:
        """See `Tables`."""
        table, state = self._table, self._table.state
        if state is not None:
            why = table.why_anew(client.bucket_uuid)
            if why is None:
                try:
                    stream = opening(state.checkpoint, group.collections)
                except CheckpointError as error:
                    if error.code != "filter_changed":
                        raise
                    why = str(error)
                else:
                    if stream.checkpoint().filter == state.checkpoint.filter:
                        return stream
                    stream.close()
                    why = "fewer collections are asked for"
            generation = state.generation + 1
            _log.warning(
                "generation %d begins: %s",
                generation,
                why,
                extra=about("generation_begun", generation=generation, reason=why),
            )
        stream = opening("earliest", group.collections)
        table.begin(stream.checkpoint())
        return stream

    def to_load(self, _client: Client, _group: Group) -> dict[str | None, Table]:
        """See `Tables`."""
        return {}

    def added(self, _client: Client, _groups: Iterable[Group]) -> dict[str | None, Table]:
        """See `Tables`."""
        return {}

    def choose(
        self, _collections: list[str] | None, _client: Client, _groups: Iterable[Group]
    ) -> dict[str | None, Table]:
        """See `Tables`."""
        raise ConfigError(
            "are all in one table, which is loaded anew for others: start it again",
            option="collections",
        )

    def route(
        self, parts: Mapping[int | None, Part], _group: Group, _groups: Iterable[Group]
    ) -> list[tuple[Table, Part]]:
        """See `Tables`."""
        return [(self._table, parts[None])]

    def collection_id(self, _table: Table) -> int | None:
        """See `Tables`."""
        return None

    def commit(self, steps: list[tuple[Table, Step]]) -> None:
        """See `Tables`."""
        for table, step in steps:
            applied = self._target.commit(step.commit)
            table.committed(step._replace(commit=applied or step.commit))

    def drop(self, group: Group) -> None:
        """See `Tables`."""

    def by_name(self, _groups: Iterable[Group]) -> dict[str, Table]:
        """See `Tables`."""
        return {}

    def forget_reload(self) -> None:
        """See `Tables`."""
        self._reload = Reload()

    def is_unavailable(self, error: Exception) -> bool:
        """See `Tables`."""
        return is_unavailable(self._target, error)

    def close(self) -> None:
        """See `Tables`."""
        self._target.close()


class TablePerCollection:
    """A table, log or history for each collection.

    Args:
        database: Where the tables are.
        names: What they are called.
        make: Makes the table of a target and a collection.
        layout: Which columns are read.
        collections: Which collections are read.
        samples: Documents to read of each collection before its columns are decided.
        reload: What the tables read again.
    """

    are_one = False

    def __init__(
        self,
        database: Database,
        names: TableNames,
        make: Callable[[Target, str], Table],
        layout: Layout,
        collections: list[str] | None,
        *,
        samples: int,
        reload: Reload,
    ) -> None:
        self.layout = layout
        self._samples = samples
        self._reload = reload
        self._database = database
        self.commits_when_idle = getattr(database, "commits_when_idle", False)
        self._names = names
        self._make = make
        self._collections = collections
        self._client: Client | None = None
        # IDs of the collections when they were last looked for, and the name of each ID seen.
        self._ids: dict[str, int] = {}
        self._known: dict[int, str] = {}
        self._nameless: set[int] = set()
        # Collection of each table, by the name that the target tells from others.
        self._taken: dict[str, str] = {}
        self._called: dict[str, str] = {}
        self._opened: dict[str, Table] = {}

    def check(self, states: Mapping[str, State], client: Client) -> dict[str, str]:
        """See `Tables`."""
        self._look(client, is_first=True)
        found: dict[str, str] = {}
        for name, state in states.items():
            collection = state.collection
            if collection is None or not self._is_chosen(collection):
                continue
            if not self._is_called(collection, name):
                continue
            table = self._make(self._database.target(name), collection)
            why = table.check(state, client.bucket_uuid, self._ids.get(collection))
            if why is not None:
                found[name] = why
        return found

    def groups(self, client: Client, buffer: Callable[[], Buffer]) -> list[Group]:
        """See `Tables`."""
        self._look(client, is_first=True)
        stored = self._database.open()
        names = {name for name in self._ids if self._name(name) is not None}
        if self._ids and not names:
            raise ConfigError(
                f"matches none of the collections {', '.join(self._ids)}", option="tables"
            )
        # Those of collections that were dropped while nothing was running.
        names |= {
            collection
            for table, collection in stored.items()
            if self._is_chosen(collection) and self._is_called(collection, table)
        }
        tables = {name: self._made(name) for name in sorted(names)}
        self._decide(client, tables.values())
        for name, table in tables.items():
            self._open(name, table)
        self._reload.apply(tables.values())
        read = {
            name: sum(table.seqnos.values())
            for name, table in tables.items()
            if table.state is not None
            and not table.state.is_loading
            and self._why_anew(table, client) is None
        }
        furthest = max(read.values(), default=0)
        first = {name for name, seqnos in read.items() if furthest - seqnos <= _FAR} or names
        found = [Group({name: tables[name] for name in sorted(first)}, self._collections, buffer())]
        if names - first:
            rest: dict[str | None, Table] = {name: tables[name] for name in sorted(names - first)}
            found.append(Group(rest, sorted(names - first), buffer()))
        return found

    def _look(self, client: Client, *, is_first: bool = False) -> None:
        """Finds out which of the chosen collections there are."""
        chosen, self._client = self._collections, client
        try:
            found = client.collections(chosen)
        except ConfigError:
            # One that is named may be created later; at the very beginning, its name is wrong.
            if is_first:
                raise
            found = {}
            for name in chosen or ():
                with contextlib.suppress(ConfigError):
                    found |= client.collections(name)
        self._ids = found
        self._known |= {number: name for name, number in found.items()}

    def _is_chosen(self, collection: str) -> bool:
        """Whether a collection that need not exist is one of those that are read."""
        if self._collections is None:
            return not collection.startswith("_system.")
        return any(matches(qualified(name), collection) for name in self._collections)

    def _name(self, collection: str) -> str | None:
        """Returns the name of a collection's table; `None` if it has none.

        Raises:
            ConfigError: Another collection has a table of that name.
        """
        name = self._names.table(collection)
        if name is None:
            return None
        other = self._taken.setdefault(self._database.fold(name), collection)
        if other != collection:
            raise ConfigError(
                f"{other} and {collection} would share the table {name}: use a template that "
                "tells them apart, or leave one out",
                option="tables",
            )
        return name

    def _is_called(self, collection: str, table: str) -> bool:
        name = self._names.table(collection)
        fold = self._database.fold
        return name is not None and fold(name) == fold(table)

    def _made(self, collection: str) -> Table:
        name = self._name(collection)
        if name is None:
            raise AssertionError(f"{collection} has a table")
        table = self._make(self._database.target(name), collection)
        before, self._opened[collection] = self._opened.get(collection), table
        if before is not None:
            table.count_on(before)
        table.restore()
        self._called[collection] = name
        return table

    def _open(self, collection: str, made: Table | None = None) -> Table:
        table = made or self._made(collection)
        table.open()
        # Those that were dropped are named by nothing else.
        for number in () if table.state is None else table.state.collection_ids:
            self._known.setdefault(number, collection)
        return table

    def stream(self, group: Group, client: Client, opening: Opening) -> ChangeStream | None:
        """See `Tables`."""
        self._look(client)
        # What neither exists nor has a table need not be read.
        for name in [name for name, table in group.tables.items() if table.state is None]:
            if name not in self._ids:
                del group.tables[name]
        names = group.reads = self._existing(group)
        if names == []:
            return None
        new: list[tuple[Table, int | None]] = []
        kept: list[Table] = []
        for name, table in group.tables.items():
            number = self.collection_id(table)
            if table.state is not None:
                why = self._why_anew(table, client)
                if why is None:
                    kept.append(table)
                    continue
                generation = table.state.generation + 1
                _log.warning(
                    "generation %d of %s begins: %s",
                    generation,
                    name,
                    why,
                    extra=about("generation_begun", table=name, generation=generation, reason=why),
                )
            new.append((table, number))
        start = self._start(client, names, kept, has_new=bool(new))
        stream = opening(start, names, fills=not _has_more(kept, start))
        begun = stream.checkpoint()
        for table, number in new:
            table.begin(begun, number)
        for table in kept:
            table.go_on_from(begun)
        return stream

    def _start(
        self, client: Client, names: list[str] | None, kept: list[Table], *, has_new: bool
    ) -> Start:
        if not kept:
            return "earliest"
        read = [table.position or table.known.checkpoint for table in kept]
        if has_new:
            read.append(read[0].restricted_to([]))
        return client._earliest_of(names, read)  # noqa: SLF001 - the package's own

    def _existing(self, group: Group) -> list[str] | None:
        """Returns the names and patterns of a group's collections without those that are gone."""
        if group.collections is None:
            return None
        return [
            name for name in group.collections if is_pattern(name) or qualified(name) in self._ids
        ]

    def to_load(self, client: Client, group: Group) -> dict[str | None, Table]:
        """See `Tables`."""
        self._look(client)
        found = {
            name: table
            for name, table in group.tables.items()
            if table.state is None or self._why_anew(table, client) is not None
        }
        kept = (table for name, table in group.tables.items() if name not in found)
        # Tables whose load was interrupted are read on together with those that have nothing.
        return found if any(not table.known.is_loading for table in kept) else {}

    def _why_anew(self, table: Table, client: Client) -> str | None:
        return table.why_anew(client.bucket_uuid, self.collection_id(table))

    def added(self, client: Client, groups: Iterable[Group]) -> dict[str | None, Table]:
        """See `Tables`."""
        named = [qualified(name) for name in self._collections or () if not is_pattern(name)]
        read = {name: table for group in groups for name, table in self._read(group).items()}
        if all(name in read for name in named):
            return {}
        self._look(client)
        known = {name: table for group in groups for name, table in group.tables.items()}
        return {
            name: known.get(name) or self._open(name)
            for name in self._ids
            if name not in read and self._name(name) is not None
        }

    def choose(
        self, collections: list[str] | None, client: Client, groups: Iterable[Group]
    ) -> dict[str | None, Table]:
        """See `Tables`."""
        before, taken = self._collections, dict(self._taken)
        check_adds(before, collections)
        known = {name for group in groups for name in group.tables}
        self._collections = collections
        try:
            self._look(client, is_first=True)
            added = [name for name in self._ids if name not in known and self._name(name)]
            tables: dict[str | None, Table] = {name: self._made(name) for name in added}
            self._decide(client, tables.values())
            for name in added:
                self._open(name, tables[name])
        except DcpError:
            self._collections, self._taken = before, taken
            raise
        return tables

    def _decide(self, client: Client, tables: Iterable[Table]) -> None:
        """Decides the columns of tables that infer them, before they are opened."""
        undecided = {str(table.collection): table.undecided for table in tables}
        schemas = {name: each for name, each in undecided.items() if each is not None}
        _decide(client, self._ids, schemas, self._samples)

    def _read(self, group: Group) -> dict[str | None, Table]:
        """Returns the tables of a group whose collections its stream has, or will have."""
        if group.reads is None:
            return group.tables
        return {
            name: table
            for name, table in group.tables.items()
            if any(matches(qualified(each), str(name)) for each in group.reads)
        }

    def route(
        self, parts: Mapping[int | None, Part], group: Group, groups: Iterable[Group]
    ) -> list[tuple[Table, Part]]:
        """See `Tables`."""
        found: dict[str, list[Part]] = {}
        of_vbuckets = parts[None].changes
        rollbacks = of_vbuckets.filter(reducing.is_rollback(of_vbuckets))
        about_all = Part(rollbacks, rollbacks.nbytes, None)
        for number, part in parts.items():
            if number is None:
                continue
            name = self._known.get(number) or self._named(number, part.changes)
            if name is not None:
                found.setdefault(name, []).append(part)
        for name, some in found.items():
            if name not in group.tables and not any(name in each.tables for each in groups):
                table = self._created(name, group, some)
                if table is not None:
                    group.tables[name] = table
        return [
            (table, part)
            for name, table in group.tables.items()
            # A collection that was dropped and made again has two IDs.
            for part in (about_all, *found.get(str(name), ()))
        ]

    def _named(self, number: int, changes: pa.Table) -> str | None:
        """Returns the name of a collection that was created since the stream was opened."""
        for scope, name in zip(
            changes["scope"].unique(), changes["collection"].unique(), strict=False
        ):
            if scope.is_valid and name.is_valid:
                self._known[number] = f"{scope}.{name}"
                return self._known[number]
        if self._client is None or number in self._nameless:
            return None
        self._look(self._client)
        if number not in self._known:
            # Dropped before its name was known: it has left nothing.
            self._nameless.add(number)
            _log.info(
                "changes of collection %#x go to no table, since it was dropped",
                number,
                extra=about("changes_left_out", collection_id=number),
            )
        return self._known.get(number)

    def _created(self, name: str, group: Group, parts: list[Part]) -> Table | None:
        """Opens the table of a collection that was created since the stream was opened."""
        if not self._is_chosen(name) or self._name(name) is None:
            return None
        table = self._open(name)
        number = max(part.changes["collection_id"][0].as_py() for part in parts)
        if group.stream is None:
            raise AssertionError("changes come from a stream")
        table.begin(group.stream.checkpoint(), number, is_whole=not group.until_now)
        called = self._called[name]
        _log.info(
            "the table %s begins, of collection %s",
            called,
            name,
            extra=about("table_begun", table=called, collection=name),
        )
        return table

    def collection_id(self, table: Table) -> int | None:
        """See `Tables`."""
        return self._ids.get(str(table.collection))

    def commit(self, steps: list[tuple[Table, Step]]) -> None:
        """See `Tables`."""
        for (table, step), applied in zip(
            steps,
            self._database.commit([(table.target, step.commit) for table, step in steps]),
            strict=True,
        ):
            table.committed(step._replace(commit=applied or step.commit))

    def drop(self, group: Group) -> None:
        """See `Tables`."""
        gone = [
            str(name)
            for name, table in group.tables.items()
            if name not in self._ids and table.has_none_newer()
        ]
        for name in gone:
            called = self._called[name]
            _log.info(
                "the table %s goes, as collection %s is gone",
                called,
                name,
                extra=about("table_dropped", table=called, collection=name),
            )
            self._database.drop(group.tables.pop(name).target)

    def by_name(self, groups: Iterable[Group]) -> dict[str, Table]:
        """See `Tables`."""
        return {
            self._called[str(name)]: table
            for group in groups
            for name, table in group.tables.items()
        }

    def forget_reload(self) -> None:
        """See `Tables`."""
        self._reload = Reload()

    def is_unavailable(self, error: Exception) -> bool:
        """See `Tables`."""
        return is_unavailable(self._database, error)

    def close(self) -> None:
        """See `Tables`."""
        self._database.close()


def _decide(
    client: Client, ids: dict[str, int], schemas: dict[str, OwnSchema], samples: int
) -> None:
    """Decides the columns of tables by documents of their collections, which may share a table."""
    ids = {name: number for name, number in ids.items() if name in schemas}
    if not ids:
        return
    seen = {id(schema): schema.contract.inference() for schema in schemas.values()}
    # Those of all tables, which one stream brings.
    masks = next(iter(schemas.values())).contract.masks
    found = sample(client, ids, lambda name: seen[id(schemas[name])], samples, masks)
    for name, inference in found.items():
        if schemas[name].decision is None:
            inference.warn_of_left_out(name)
        schemas[name].decide(inference)


def _has_more(tables: list[Table], start: Start) -> bool:
    """Whether a table has read some of a vBucket that a stream reads from the beginning."""
    begun = {} if start == "earliest" else start.seqnos
    return any(
        seqno and not begun.get(vbucket, 0)
        for table in tables
        for vbucket, seqno in table.seqnos.items()
    )
