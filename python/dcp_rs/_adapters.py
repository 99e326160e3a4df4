"""What the adapters of engines share: a plan, and how its partitions are delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dcp_rs import _checks
from dcp_rs.client import Client
from dcp_rs.exceptions import ConfigError
from dcp_rs.options import Masks, engine_options
from dcp_rs.plan import ReadPlan
from dcp_rs.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    import pyarrow as pa

    from dcp_rs.documents import DocumentSchema
    from dcp_rs.options import BatchPolicy, Include, Op


@dataclass(frozen=True)
class Filters:
    """What a plan leaves out."""

    collections: str | Iterable[str] | None
    keys: str | Iterable[str] | None
    ops: Op | Iterable[Op] | None
    since: datetime | float | None


@dataclass(frozen=True)
class Delivery:
    """How changes are delivered, as the options of `dcp_rs.Partition.open`."""

    schema: Schema
    columns: Literal["basic", "full"] | Sequence[str]
    document_schema: str | pa.Schema | DocumentSchema | None
    # All but `columns` and `document_schema`.
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        columns: Literal["basic", "full"] | Sequence[str],
        document_schema: str | pa.Schema | DocumentSchema | None,
        shape: dict[str, Any],
        masks: Masks,
        batch: BatchPolicy | None,
    ) -> Delivery:
        """Checks the options.

        Raises:
            ConfigError: One is wrong.
        """
        _checks.word("value_format", shape["value_format"], ("binary", "string"))
        include = shape["include"]
        shape["include"] = include if isinstance(include, str) else tuple(include)
        schema = Schema(columns=columns, document_schema=document_schema, **shape)
        engine_options({"batch": batch, "document_schema": None})
        return cls(schema, columns, document_schema, {**shape, **masks.options, "batch": batch})


def plan_of(
    client: Client,
    plan: ReadPlan | None,
    filters: Filters,
    include: Include | Iterable[Include],
    partitions: int | None = None,
) -> ReadPlan:
    """Returns a plan that was given, or one of everything up to now.

    Raises:
        ConfigError: An option is wrong, or is the given plan's.
        DcpError: As `dcp_rs.Client.plan`.
    """
    _checks.instance("client", client, Client, "a Client")
    of_plan = {**vars(filters), "partitions": partitions}
    if plan is None:
        return client.plan(**of_plan, include=include, is_last=True)
    _checks.instance("plan", plan, ReadPlan, "a ReadPlan")
    for option, value in of_plan.items():
        if value is not None:
            raise ConfigError("is the plan's: pass it to Client.plan", option=option)
    return plan
