"""`dcp-rs checkpoint`: show and change checkpoint files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import click

from dcp_rs.checkpoint import Checkpoint
from dcp_rs.cli._options import file_name, output_options, vbuckets_option
from dcp_rs.cli._output import print_records
from dcp_rs.exceptions import CheckpointError, ConfigError
from dcp_rs.importing import client_of, import_checkpoint
from dcp_rs.stores import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable


@click.group()
def checkpoint() -> None:
    """Show, reset, copy or import a checkpoint."""


def _of_vbuckets(command: Callable[..., None]) -> Callable[..., None]:
    return vbuckets_option(output_options(command))


@checkpoint.command()
@click.argument("file", metavar="FILE", type=file_name)
@_of_vbuckets
def show(file: str, vbuckets: set[int] | None, *, as_json: bool) -> None:
    """Print the positions in FILE."""
    kept = _loaded(file)
    chosen = _chosen(file, kept, vbuckets)
    positions = {vb: position for vb, position in kept.positions.items() if vb in chosen}
    if as_json:
        found = {vbucket: asdict(position) for vbucket, position in positions.items()}
        made_with = None if kept.filter is None else asdict(kept.filter)
        head = {"bucket_uuid": kept.bucket_uuid, "filter": made_with}
        print(json.dumps(head | {"positions": found}))
        return
    print(f"bucket {kept.bucket_uuid}, {len(positions)} vBuckets")
    print(f"made with {kept.filter or 'a filter of which only a hash was stored'}")
    records = [
        {
            "vbucket": vbucket,
            "seqno": at.seqno,
            "snapshot": f"{at.snapshot_start}-{at.snapshot_end}",
            "vbuuid": f"{at.vbuuid:#x}",
            "epoch": at.epoch,
            "manifest": f"{at.manifest_uid:#x}",
            "purged": at.purge_seqno,
        }
        for vbucket, at in positions.items()
    ]
    if records:
        print_records(list(records[0]), records, as_json=False)


@checkpoint.command()
@click.argument("file", metavar="FILE", type=file_name)
@_of_vbuckets
def reset(file: str, vbuckets: set[int] | None, *, as_json: bool) -> None:
    """Remove positions, so that their vBuckets are read from the beginning.

    FILE keeps its bucket and filter. The next save of a reader that is still running fails.
    """
    kept = _loaded(file)
    forgotten = _chosen(file, kept, vbuckets)
    FileStore(file).reset(forgotten)
    if as_json:
        print(json.dumps({"file": file, "reset": sorted(forgotten)}))
    else:
        print(f"{file}: reset {len(forgotten)} vBuckets, kept {len(kept) - len(forgotten)}")


@checkpoint.command()
@click.argument("file", metavar="FROM", type=file_name)
@click.argument("to", metavar="TO", type=file_name)
@click.option("--force", is_flag=True, help="Overwrite TO if it exists.")
@_of_vbuckets
def copy(file: str, to: str, vbuckets: set[int] | None, *, force: bool, as_json: bool) -> None:
    """Copy a checkpoint, or some of its positions.

    Verifies the checkpoint, and copies it atomically to a file that only its owner can read.
    """
    if os.path.lexists(to) and not force:
        raise CheckpointError(f"{to} already exists: use --force to overwrite it")
    kept = _loaded(file)
    kept = kept.restricted_to(_chosen(file, kept, vbuckets))
    kept.save(to)
    if as_json:
        print(json.dumps({"file": to, "vbuckets": sorted(kept.positions)}))
    else:
        print(f"{to}: {len(kept)} vBuckets")


@checkpoint.command(name="import")
@click.argument("file", metavar="FROM", type=file_name)
@click.argument("to", metavar="TO", type=file_name)
@click.option(
    "--from",
    "made_by",
    type=click.Choice(["go-dcp", "kafka-connect"]),
    required=True,
    help="The client that stored FROM.",
)
@click.option("--bucket-uuid", help="UUID of the bucket, which kafka-connect does not store.")
@click.option(
    "--collection-id",
    "collection_ids",
    multiple=True,
    help="ID of a collection, as 0x8, if the client read only some. Repeatable.",
)
@click.option("--force", is_flag=True, help="Overwrite TO if it exists.")
@output_options
def import_(
    file: str,
    to: str,
    made_by: Literal["go-dcp", "kafka-connect"],
    bucket_uuid: str | None,
    collection_ids: tuple[str, ...],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Make a checkpoint of the positions that another client stored.

    The guide on moving from other clients says how to get FROM. Stop the client first.
    """
    if os.path.lexists(to) and not force:
        raise CheckpointError(f"{to} already exists: use --force to overwrite it")
    try:
        ids = [int(each, 16) for each in collection_ids] or None
    except ValueError as error:
        raise ConfigError("is no hexadecimal number", option="collection_ids") from error
    found = import_checkpoint(file, made_by, bucket_uuid=bucket_uuid, collection_ids=ids)
    found.save(to)
    if as_json:
        print(json.dumps({"file": to, "vbuckets": sorted(found.positions)}))
    else:
        print(f"{to}: {len(found)} vBuckets of the bucket {found.bucket_uuid}")


def _loaded(file: str) -> Checkpoint:
    """Reads a checkpoint, or says how to import one of another client."""
    try:
        return Checkpoint.load(file)
    except CheckpointError as error:
        client = client_of(file)
        if client is None:
            raise
        more = " --bucket-uuid UUID" if client == "kafka-connect" else ""
        raise CheckpointError(
            f"{file} has the positions of {client}: make a checkpoint of them with dcp-rs"
            f" checkpoint import {file} TO --from {client}{more}"
        ) from error


def _chosen(file: str, kept: Checkpoint, vbuckets: set[int] | None) -> set[int]:
    chosen = set(kept.positions)
    if vbuckets is not None:
        chosen &= vbuckets
        if not chosen:
            raise CheckpointError(
                f"{file} has no position of these vBuckets: see dcp-rs checkpoint show"
            )
    return chosen
