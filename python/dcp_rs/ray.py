"""Read a bucket in Ray Data. Install the extra `ray`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dcp_rs import _keywords
from dcp_rs._adapters import Delivery, Filters, plan_of
from dcp_rs._libraries import require
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import Masks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    import pyarrow as pa
    from ray.data import Dataset
    from ray.data.datasource import Datasource

    from dcp_rs.client import Client
    from dcp_rs.documents import DocumentSchema
    from dcp_rs.options import BatchPolicy, Include, Op
    from dcp_rs.plan import Partition, ReadPlan

# What Ray is told that a change takes, before it has read one.
_BYTES_PER_CHANGE = 512


@_keywords.checked
def read(
    client: Client,
    plan: ReadPlan | None = None,
    *,
    partitions: int | None = None,
    collections: str | Iterable[str] | None = None,
    keys: str | Iterable[str] | None = None,
    ops: Op | Iterable[Op] | None = None,
    since: datetime | float | None = None,
    columns: Literal["basic", "full"] | Sequence[str] = "basic",
    key_type: Literal["string", "binary"] = "string",
    value_format: Literal["binary", "string"] = "binary",
    document_schema: str | pa.Schema | DocumentSchema | None = None,
    drop_fields: str | Iterable[str] | None = None,
    hash_fields: str | Iterable[str] | None = None,
    hash_key: str | bytes | None = None,
    include: Include | Iterable[Include] = (),
    batch: BatchPolicy | None = None,
) -> Dataset:
    """Returns the changes of a bucket as a dataset of Ray, without reading any.

        client = dcp_rs.connect("couchbases://cb.example.org/travel", username="reader",
                                password_file="/run/secrets/couchbase")
        changes = dcp_rs.ray.read(client, document_schema="name STRING, n BIGINT")
        changes.filter(expr="op == 'mutation'").groupby("name").count().show()

    The bounds are taken now. Each partition of the plan is a task, which connects from where Ray
    runs it; a task that Ray runs again reads up to the same bounds. Within a task, the rows of a
    vBucket are in the order of their seqnos.

    Args:
        client: A client of the bucket. Tasks connect with its options, which they get without
            secrets: its credentials must be in a `password_file` or `token_file`, with a function
            as `credentials` or `token`, or a client certificate.
        plan: What to read; by default, everything up to now. To continue where an earlier plan
            ended, pass `client.plan(start=end)`.
        partitions: Most tasks, as in `dcp_rs.Client.plan`. This and the next four only without
            `plan`.
        collections: As in `dcp_rs.Client.stream`, like the options below.
        keys: As there.
        ops: As there.
        since: As there.
        columns: As there. Without `value` and `document_schema`, the server sends no documents.
        key_type: As there.
        value_format: As there. Ray has no type for `variant`.
        document_schema: As there.
        drop_fields: As there.
        hash_fields: As there.
        hash_key: As there. Tasks get it with the other options.
        include: As there.
        batch: As there.

    Raises:
        ConfigError: An option is wrong, or the client has a secret in its options.
        ImportError: Ray is not installed.
        DcpError: As `dcp_rs.Client.plan`. A dataset that is executed raises what
            `dcp_rs.Partition.open` and a stream raise, within an error of Ray.
    """
    data = require("dcp_rs.ray.read", "ray.data", "ray")
    shape: dict[str, Any] = {
        "key_type": key_type,
        "value_format": value_format,
        "include": include,
    }
    masks = Masks.of(drop_fields, hash_fields, hash_key)
    delivery = Delivery.of(columns, document_schema, shape, masks, batch)
    filters = Filters(collections, keys, ops, since)
    plan = plan_of(client, plan, filters, shape["include"], partitions)
    if any(partition.needs_client for partition in plan.partitions):
        raise ConfigError(
            "has a password, token or passphrase in its options, which the tasks of Ray do not "
            "get: connect with password_file, token_file, a client certificate, or functions as "
            "credentials or token",
            option="client",
        )
    found: Dataset = data.read_datasource(_source(plan, delivery))
    return found


def _source(plan: ReadPlan, delivery: Delivery) -> Datasource:
    """Returns what Ray asks for the tasks of a plan."""
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask

    schema = delivery.schema.to_pyarrow()
    options = {
        **delivery.options,
        "columns": delivery.columns,
        "document_schema": delivery.document_schema,
    }

    class Source(Datasource):  # type: ignore[misc] # its base is not known before it is imported
        """The partitions of a plan."""

        def get_name(self) -> str:
            """Returns its name in Ray's output."""
            return "Couchbase"

        def estimate_inmemory_data_size(self) -> int:
            """Returns about how many bytes the rows take."""
            return plan.size * _BYTES_PER_CHANGE

        def get_read_tasks(
            self,
            parallelism: int,  # noqa: ARG002 - the plan is divided already
            per_task_row_limit: int | None = None,
            data_context: object = None,  # noqa: ARG002
        ) -> list[ReadTask]:
            """Returns a task for each partition; one that reads nothing, if there is none."""
            return [
                ReadTask(
                    _Read(partition, options, schema),
                    BlockMetadata(
                        num_rows=None,
                        size_bytes=0 if partition is None else partition.size * _BYTES_PER_CHANGE,
                        exec_stats=None,
                        input_files=None,
                    ),
                    schema=schema,
                    per_task_row_limit=per_task_row_limit,
                )
                for partition in plan.partitions or (None,)
            ]

    return Source()


@dataclass(frozen=True)
class _Read:
    """What a task does."""

    partition: Partition | None
    options: dict[str, Any]
    schema: pa.Schema

    def __call__(self) -> Iterator[pa.Table]:
        """Reads the partition."""
        import pyarrow as pa

        if self.partition is None:
            yield self.schema.empty_table()
            return
        with self.partition.open(**self.options) as stream:
            has_rows = False
            for batch in stream:
                has_rows = True
                yield pa.Table.from_batches([batch.to_pyarrow()])
            if not has_rows:
                yield self.schema.empty_table()
