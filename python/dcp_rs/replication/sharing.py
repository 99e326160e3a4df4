"""Shares of a bucket, which several processes replicate to one table, each its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from dcp_rs import _checks
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.options import Share

_TEXT = re.compile(r"([0-9]{1,5})/([1-9][0-9]{0,4})")
# What a state of a share is saved under: the name of the table, and this. No table has such a name,
# as no part of one is empty.
_SUFFIX = re.compile(r"\.\.([0-9]{1,5}/[0-9]{1,5})$")
SUFFIX = r"\.\.[0-9]{1,5}/[0-9]{1,5}$"
"""The same as a regular expression of SQL."""


@dataclass(frozen=True, order=True)
class BucketShare:
    """The vBuckets that one of several processes replicates.

    They are those of `dcp_rs.Share`, which every process computes alike. Keys are hashed to
    vBuckets, so that each share has as many documents, and all together ask each node for its
    vBuckets, however they are chosen. Those of a share are next to each other: the condition that
    selects their rows is short, and it needs fewer connections where a node has a range of them.

    Attributes:
        number: Which share, from 1.
        of: Number of shares.
        num_vbuckets: Number of vBuckets in the bucket.
    """

    number: int
    of: int
    num_vbuckets: int

    @classmethod
    def parse(cls, text: object, num_vbuckets: int) -> Self:
        """Reads the option of `dcp_rs.replicate`.

        Raises:
            ConfigError: It is no share of the bucket.
        """
        _checks.text("share", text)
        found = _TEXT.fullmatch(str(text))
        if found is None:
            raise ConfigError(
                f"must be a share and the number of shares, such as 2/5, not {text!r}",
                option="share",
            )
        number, of = map(int, found.groups())
        if not 1 <= number <= of:
            raise ConfigError(f"shares are numbered from 1/{of} to {of}/{of}", option="share")
        if of > num_vbuckets:
            raise ConfigError(
                f"{of} shares are too many: the bucket has only {num_vbuckets} vBuckets",
                option="share",
            )
        return cls(number, of, num_vbuckets)

    def all(self) -> list[BucketShare]:
        """Returns the shares that make up the bucket."""
        return [BucketShare(each, self.of, self.num_vbuckets) for each in range(1, self.of + 1)]

    @property
    def member(self) -> Share:
        """The share as a stream takes it."""
        return Share(self.number - 1, self.of)

    @property
    def vbuckets(self) -> range:
        """The vBuckets."""
        return self.member.vbuckets(self.num_vbuckets)

    @property
    def condition(self) -> str:
        """Condition in SQL that selects its rows; each row, whoever made it, is of one share."""
        own = self.vbuckets
        if self.of == 1:
            return "true"
        if self.number == 1:
            return f"(vbucket < {own.stop} OR vbucket IS NULL)"
        if self.number == self.of:
            return f"vbucket >= {own.start}"
        return f"vbucket BETWEEN {own.start} AND {own.stop - 1}"

    def key(self, table: str) -> str:
        """Returns what the state of a table is saved under."""
        return f"{table}..{self}"

    def check_bucket(self, num_vbuckets: int) -> None:
        """Checks that a bucket has as many vBuckets as the one that the share is of.

        Raises:
            CheckpointError: It has more or fewer.
        """
        if num_vbuckets != self.num_vbuckets:
            raise CheckpointError(
                f"the share was one of {self.num_vbuckets} vBuckets, and the bucket has"
                f" {num_vbuckets} now, so that rows belong to other shares: replicate to a new"
                " table"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def split_key(key: str) -> tuple[str, str | None]:
    """Returns the table that a state is of, and the share; `None` for the whole bucket."""
    found = _SUFFIX.search(key)
    return (key, None) if found is None else (key[: found.start()], found[1])


def called(key: str) -> str:
    """Returns what a table, or a share of it, is called in a message."""
    table, share = split_key(key)
    return table if share is None else f"share {share} of {table}"


def take_share(target: Any, share: BucketShare | None) -> None:
    """Gives a target or a database the share that it is to hold.

    Raises:
        ConfigError: It has no shares.
    """
    if hasattr(target, "take_share"):
        target.take_share(share)
    elif share is not None:
        name = type(target).__name__.removesuffix("Target").removesuffix("Database")
        raise ConfigError(
            f"{name} has one writer: take postgresql://, to which several processes can write, or"
            " replicate the whole bucket in one process",
            option="share",
        )


def check_options(mode: str, on_drop: str) -> None:
    """Checks options of a replication of a share.

    Raises:
        ConfigError: One needs the whole bucket.
    """
    if mode != "table":
        raise ConfigError(
            f"a {mode} is read by the newest generation of all its rows, and each share has its"
            " own: write a table, or leave out share",
            option="mode",
        )
    if on_drop == "drop":
        raise ConfigError(
            "one of several shares drops no table, which the others may still write to: set it to"
            " empty or keep, or leave out share",
            option="on_drop",
        )
