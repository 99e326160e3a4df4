"""The position of a reader that runs elsewhere: from its checkpoint file or its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

import click

from dcp_rs._libraries import require
from dcp_rs.checkpoint import Checkpoint
from dcp_rs.cli._options import file_name, with_options
from dcp_rs.exceptions import CheckpointError, ConfigError, ConnectError

if TYPE_CHECKING:
    from dcp_rs.cli._options import Decorator
    from dcp_rs.client import Client

_SEQNO = "dcp_rs_vbucket_seqno"
_AGE = "dcp_rs_vbucket_lag_seconds"
_OLDEST = "dcp_rs_lag_seconds"
# Far more than 65,536 vBuckets of several streams take.
_MAX_BYTES = 64 << 20
_TIMEOUT = 10.0


class Position(NamedTuple):
    """Where a reader is.

    Attributes:
        seqnos: Its seqno by vBucket.
        ages: Age of the oldest change of each vBucket that it has not committed, in seconds; `None`
            if it does not say.
    """

    seqnos: dict[int, int]
    ages: dict[int, float] | None = None


@dataclass(frozen=True)
class Reader:
    """Where a reader shows its position."""

    checkpoint: str | None
    metrics: str | None
    stream: str | None

    def seqnos(self, client: Client) -> dict[int, int]:
        """Returns the reader's seqno by vBucket, as of now; the errors are those of `position`."""
        return self.position(client).seqnos

    def position(self, client: Client) -> Position:
        """Returns where the reader is now.

        Raises:
            CheckpointError: The file is missing, damaged, or of another bucket.
            ConfigError: The metrics lack the seqnos of one stream of the bucket.
            ConnectError: The metrics cannot be read.
        """
        if self.checkpoint is None:
            return self._exported(client.bucket_name)
        kept = Checkpoint.load(self.checkpoint)
        if client.bucket_uuid != kept.bucket_uuid:
            raise CheckpointError(
                f"{self.checkpoint} belongs to another bucket: its UUID is {kept.bucket_uuid}, that"
                f" of {client.bucket_name} is {client.bucket_uuid}"
            )
        return Position(dict(kept.seqnos))

    def _exported(self, bucket: str) -> Position:
        streams: dict[str, dict[int, int]] = {}
        ages: dict[str, dict[int, float]] = {}
        for name, labels, value in _samples(str(self.metrics)):
            stream = labels.get("stream", "")
            if labels.get("bucket") != bucket:
                continue
            if name == _OLDEST:
                ages.setdefault(stream, {})
                continue
            try:
                vbucket = int(labels["vbucket"])
                if name == _AGE:
                    ages.setdefault(stream, {})[vbucket] = float(value)
                else:
                    streams.setdefault(stream, {})[vbucket] = int(value)
            except (KeyError, ValueError, OverflowError) as error:
                raise ConfigError(
                    f"{self.metrics}: {name} is not that of a vBucket: {labels} {value}",
                    option="--metrics",
                ) from error
        if not streams:
            raise ConfigError(
                f"{self.metrics} has no {_SEQNO} for the bucket {bucket}: the reader needs"
                " PrometheusCollector(stream, vbuckets=True), and the URL of a listener ends in"
                " /metrics?vbuckets=1",
                option="--metrics",
            )
        chosen = [self.stream] if self.stream is not None else list(streams)
        if len(chosen) > 1 or chosen[0] not in streams:
            raise ConfigError(
                f"{self.metrics} has the streams {', '.join(sorted(streams))}: pass one of them",
                option="--stream",
            )
        return Position(streams[chosen[0]], ages.get(chosen[0]))


def _samples(url: str) -> list[tuple[str, dict[str, str], float]]:
    parser = require("--metrics", "prometheus_client.parser", "prometheus")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"not a URL: {error}", option="--metrics") from error
    if "@" in parts.netloc:
        raise ConfigError("a user or password in the URL is not supported", option="--metrics")
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an http or https URL", option="--metrics")
    try:
        with urlopen(url, timeout=_TIMEOUT) as answer:  # noqa: S310 - the scheme is checked
            text = answer.read(_MAX_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise ConnectError(
            f"{url} cannot be read: {error}: does the reader serve its metrics there?"
        ) from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{url} sends more than {_MAX_BYTES >> 20} MiB", option="--metrics")
    try:
        families = list(parser.text_string_to_metric_families(text.decode()))
    except ValueError as error:
        raise ConfigError(
            f"{url} does not serve Prometheus metrics: {error}", option="--metrics"
        ) from error
    return [
        (family.name, sample.labels, sample.value)
        for family in families
        if family.name in {_SEQNO, _AGE, _OLDEST}
        for sample in family.samples
    ]


def reader_options(*, required: bool) -> Decorator:
    """Passes `reader` to the command.

    Args:
        required: Whether one has to be named; otherwise `reader` may be None.
    """

    def take(options: dict[str, Any]) -> None:
        checkpoint, metrics = options.pop("checkpoint"), options.pop("metrics")
        stream = options.pop("stream")
        given = sum(each is not None for each in (checkpoint, metrics))
        if given > 1 or (required and not given):
            raise click.UsageError("pass either --checkpoint or --metrics")
        if stream is not None and metrics is None:
            raise click.UsageError("--stream needs --metrics")
        options["reader"] = Reader(checkpoint, metrics, stream) if given else None

    return with_options(
        [
            click.option(
                "--checkpoint",
                metavar="FILE",
                type=file_name,
                help="Checkpoint file of the reader.",
            ),
            click.option("--metrics", metavar="URL", help="Prometheus metrics of the reader."),
            click.option(
                "--stream", metavar="NAME", help="The reader's stream, if it has several."
            ),
        ],
        take,
    )
