"""What tables are to read again from the beginning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError
from dcp_rs.replication.names import qualified

if TYPE_CHECKING:
    from dcp_rs.replication.table import Table


@dataclass(frozen=True)
class Reload:
    """vBuckets that tables read again, as if the server had rolled them back to 0.

    Attributes:
        vbuckets: Those of all tables.
        by_collection: Those of the tables of collections; `None` for all that there are.
    """

    vbuckets: frozenset[int] = frozenset()
    by_collection: Mapping[str, frozenset[int] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, given: object, num_vbuckets: int) -> Reload:
        """Reads the option of `dcp_rs.replicate`.

        Args:
            given: Its value.
            num_vbuckets: How many vBuckets the bucket has.

        Raises:
            ConfigError: It is neither vBuckets nor a mapping from collections to vBuckets, or the
                bucket has no such vBucket.
        """
        found = cls._of(given)
        of_collections = (each for each in found.by_collection.values() if each is not None)
        _checks.existing("reload", sorted(found.vbuckets.union(*of_collections)), num_vbuckets)
        return found

    @classmethod
    def _of(cls, given: object) -> Reload:
        if given is None:
            return cls()
        try:
            if isinstance(given, Mapping):
                names = _checks.names("reload", given)
                return cls(
                    by_collection={
                        qualified(name): None
                        if given[name] is None
                        else frozenset(_checks.vbuckets(given[name]))
                        for name in names
                    }
                )
            if isinstance(given, Iterable) and not isinstance(given, str):
                return cls(frozenset(_checks.vbuckets(given)))
        except ConfigError as error:
            raise ConfigError(str(error).partition(": ")[2], option="reload") from error
        raise _checks.wrong_type("reload", given, "vBuckets, or a mapping from collections to them")

    def apply(self, tables: Iterable[Table]) -> None:
        """Has tables, which are open, read again what they are to.

        Raises:
            ConfigError: There is no table of a collection.
        """
        tables = list(tables)
        unknown = self.by_collection.keys() - {table.collection for table in tables}
        if unknown:
            raise ConfigError(
                f"no table is of {', '.join(sorted(unknown))}: name collections that are read",
                option="reload",
            )
        for table in tables:
            own = self.by_collection.get(str(table.collection), self.vbuckets)
            table.read_again(own)
