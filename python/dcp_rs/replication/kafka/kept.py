"""The records that a compacted topic has, as far as a condition in SQL needs them."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from dcp_rs.replication.kafka.records import HEADERS, JOINED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dcp_rs.replication.kafka.records import Implied

_POSITION = ("collection_id", "vbucket", "epoch", "generation")
_BATCH = 10_000


class Kept:
    """Keys of a topic with their positions, in a temporary file once they are many.

    Args:
        implied: The position of records that have none.
    """

    def __init__(self, implied: Implied | None = None) -> None:
        self._implied = implied
        self._rows = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._rows.execute("PRAGMA cache_size = -16384")
        self._rows.execute(
            f"CREATE TABLE kept (partition INTEGER, key BLOB, {', '.join(_POSITION)},"
            " PRIMARY KEY (partition, key)) WITHOUT ROWID"
        )

    def read(self, records: Iterable[Any]) -> None:
        """Takes records of confluent-kafka in the order of their partitions."""
        self._rows.execute("BEGIN")
        for record in records:
            key = record.key()
            if key is None:
                continue
            if record.value() is None:
                self.remove(record.partition(), key)
            else:
                position: Mapping[str, int | str] = position_of(record)
                if not position and self._implied is not None:
                    position = self._implied.of(key)
                self.add(record.partition(), key, [position.get(name) for name in _POSITION])
        self._rows.execute("COMMIT")

    def add(self, partition: int, key: bytes, position: Sequence[int | str | None]) -> None:
        """Adds a key, or moves it."""
        self._rows.execute(
            "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?)", (partition, key, *position)
        )

    def remove(self, partition: int, key: bytes) -> None:
        """Removes a key."""
        self._rows.execute("DELETE FROM kept WHERE partition = ? AND key = ?", (partition, key))

    def has(self, partition: int, key: bytes) -> bool:
        """Whether a key is there."""
        found = self._rows.execute(
            "SELECT 1 FROM kept WHERE partition = ? AND key = ?", (partition, key)
        )
        return found.fetchone() is not None

    def __len__(self) -> int:
        (count,) = self._rows.execute("SELECT count(*) FROM kept").fetchone()
        return int(count)

    def chosen(self, conditions: Sequence[str]) -> Iterator[list[tuple[int, bytes]]]:
        """Returns the keys that one of the conditions selects, by batches."""
        where = " OR ".join(f"({condition})" for condition in conditions)
        # The conditions are those of a commit, which this package made.
        found = self._rows.execute(f"SELECT partition, key FROM kept WHERE {where}")  # noqa: S608
        while batch := found.fetchmany(_BATCH):
            yield batch

    def close(self) -> None:
        """Removes the file."""
        self._rows.close()


def position_of(record: Any) -> dict[str, int | str]:
    """Returns the position that a record's headers say."""
    headers = dict(record.headers() or ())
    if JOINED in headers:
        values = headers[JOINED].decode().split(",")
        headers = dict(zip(HEADERS, (value.encode() for value in values), strict=False))
    found: dict[str, int | str] = {}
    for name in HEADERS:
        text = (headers.get(name) or b"").decode("utf-8", "replace")
        if text:
            found[name] = int(text) if text.lstrip("-").isdigit() else text
    return found
