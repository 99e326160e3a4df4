"""Several tables, each in a folder of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.rejects import SUFFIX
from dcp_rs.replication.storage import Objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcp_rs.replication.state import Mode, State
    from dcp_rs.replication.storage import Found, Storage
    from dcp_rs.replication.target import Address, Commit

_T = TypeVar("_T", bound="_Closes")


class _Closes(Protocol):
    def commit(self, commit: Commit) -> Commit | None: ...
    def close(self) -> None: ...


DEPTH = 3
"""Levels of folders below the one of the database in which tables are looked for."""
# What the name of a folder ends with that is being removed.
_DROPPED = ".dropped"


class FolderOfTables(Generic[_T]):
    """A folder with a folder for each table, which are written one after the other.

    Args:
        folder: The folder; created with the first table.
    """

    modes: ClassVar[frozenset[Mode]]
    takes_rejects: ClassVar[bool] = True
    scheme: ClassVar[str]
    marker: ClassVar[str]
    """Name of a file or folder in the folder of a table that has a state."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._tables: dict[int, tuple[_T, Path]] = {}

    @classmethod
    def at(cls, address: Address) -> FolderOfTables[_T]:
        """Creates the database for a URL such as `delta:///folder`.

        Raises:
            ConfigError: There is no folder, or an option.
        """
        address.allow()
        return cls(address.local_path("the folder of the tables", f"{cls.scheme}:///folder"))

    def open(self) -> dict[str, str]:
        """See `dcp_rs.replication.Database.open`."""
        found: dict[str, str] = {}
        for path, folders, files in os.walk(self._folder):
            place = Path(path).relative_to(self._folder)
            for name in [name for name in folders if name[0] == "." and name.endswith(_DROPPED)]:
                folders.remove(name)
                shutil.rmtree(Path(path) / name, ignore_errors=True)
            if self.marker in folders or self.marker in files:
                state = self.state_in(Path(path))
                if state is not None and state.collection is not None:
                    found[str(place)] = state.collection
                folders.clear()
            elif len(place.parts) >= DEPTH:
                folders.clear()
        return found

    def state_in(self, folder: Path) -> State | None:
        """Returns the newest state in the folder of a table."""
        raise NotImplementedError

    def make(self, folder: Path) -> _T:
        """Returns the target of a folder."""
        raise NotImplementedError

    def target(self, table: str) -> _T:
        """See `dcp_rs.replication.Database.target`."""
        parts = Path(table).parts
        if not parts or Path(table).is_absolute() or ".." in parts or len(parts) > DEPTH:
            raise ConfigError(
                f"{table!r} is no folder below that of the tables, at most {DEPTH} levels deep",
                option="tables",
            )
        made = self.make(self._folder / table)
        self._tables[id(made)] = made, self._folder / table
        return made

    def fold(self, table: str) -> str:
        """See `dcp_rs.replication.Database.fold`."""
        # Object stores and most file systems tell capitals from small letters; some do not.
        return os.path.normpath(table).lower()

    def commit(self, commits: Sequence[tuple[_T, Commit]]) -> list[Commit | None]:
        """See `dcp_rs.replication.Database.commit`."""
        return [target.commit(commit) for target, commit in commits]

    def drop(self, target: _T) -> None:
        """See `dcp_rs.replication.Database.drop`."""
        _, folder = self._tables.pop(id(target))
        target.close()
        # Rejects first: the folder of the table has the state, by which a restart drops it again.
        for each in (folder.with_name(f"{folder.name}{SUFFIX}"), folder):
            if each.exists():
                doomed = each.with_name(f".{each.name}{_DROPPED}")
                each.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def close(self) -> None:
        """Closes the tables."""
        for table, _ in self._tables.values():
            table.close()
        self._tables.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._folder)!r})"


class StoredTables(FolderOfTables[_T]):
    """The same in object storage, where a folder is a prefix of names.

    Args:
        storage: Location of the folders.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        # Relative to the location.
        self._folder = Path()
        self._tables = {}

    def open(self) -> dict[str, str]:
        """See `dcp_rs.replication.Database.open`."""
        self._storage.probe()
        found: dict[str, str] = {}
        for place in self._places(Path(), self._storage):
            state = self.state_at(self._storage.below(str(place)))
            if state is not None and state.collection is not None:
                found[str(place)] = state.collection
        return found

    def _places(self, place: Path, storage: Storage) -> Iterator[Path]:
        folders, files = Objects(storage).folders_and_files()
        if place.parts and self.is_table(folders, files):
            yield place
        elif len(place.parts) < DEPTH:
            for each in folders:
                yield from self._places(place / each, storage.below(each))

    def is_table(self, folders: list[str], files: list[Found]) -> bool:
        """Whether what is directly in a folder is a table that has a state."""
        raise NotImplementedError

    def state_at(self, storage: Storage) -> State | None:
        """Returns the newest state of a table."""
        raise NotImplementedError

    def state_in(self, folder: Path) -> State | None:
        """See `FolderOfTables`, whose folders this one has not."""
        raise NotImplementedError

    def drop(self, target: _T) -> None:
        """See `dcp_rs.replication.Database.drop`."""
        _, place = self._tables.pop(id(target))
        target.close()
        storage = self._storage.below(str(place))
        # What makes it a table goes last: by its state a restart drops it again.
        for each in (storage.beside(SUFFIX), storage):
            objects = Objects(each)
            names = [file.name for file in objects.files()]
            objects.remove(sorted(names, key=lambda name: (name.startswith(self.marker), name)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._storage.url!r})"
