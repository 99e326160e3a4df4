"""The schemas that documents of a bucket have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dcp_rs import _checks, _keywords
from dcp_rs._libraries import require_pyarrow
from dcp_rs.client import Client
from dcp_rs.options import Masks

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, kw_only=True)
class InferredField:
    """A field of documents.

    Attributes:
        path: Names from the document to the field.
        type: Type of a column that holds every value; `None` if only nulls were seen.
        share: Share of the JSON objects among the documents that have the field.
        example: The beginning of a value's JSON text, if examples were asked for.
    """

    path: tuple[str, ...]
    type: str | None
    share: float
    example: str | None


@dataclass(frozen=True, kw_only=True)
class InferredSchema:
    """The schema of the documents of a collection.

    Attributes:
        documents: Documents that it was inferred from.
        document_schema: The schema, as `document_schema` takes it; `None` if none of them is a JSON
            object with a field.
        prefix: The `prefix` of a `dcp_rs.DocumentSchema` that it needs, since a field has the name
            of another column; empty if it needs none.
        fields: The fields.
    """

    documents: int
    document_schema: str | None
    prefix: str
    fields: tuple[InferredField, ...]


@_keywords.checked
def infer_schemas(
    client: Client,
    *,
    collections: str | Iterable[str] | None = None,
    sample: int = 1000,
    nested: Literal["json", "struct"] = "json",
    examples: bool = False,
    drop_fields: str | Iterable[str] | None = None,
    hash_fields: str | Iterable[str] | None = None,
) -> dict[str, InferredSchema]:
    """Infers the schema of each collection, as `dcp_rs.replicate` with `infer` does.

    Args:
        client: Client of the bucket.
        collections: Collections to read, as in `dcp_rs.Client.stream`.
        sample: Documents to read of each, spread over vBuckets.
        nested: What becomes of objects within documents: `json`, a column of text, or `struct`.
        examples: Whether to keep an example of each field, which is a part of a document.
        drop_fields: Fields to leave out, as in `dcp_rs.Client.stream`.
        hash_fields: Fields that are hashed, and so text.

    Returns:
        The schemas, by the name of the collection.

    Raises:
        ConfigError: An option is wrong.
        DcpError: The stream failed.
        ImportError: PyArrow is not installed.
    """
    require_pyarrow("infer_schemas")
    from dcp_rs.replication.decoding import Decoder, Inference
    from dcp_rs.replication.sampling import sample as read

    _checks.instance("client", client, Client, "a Client")
    _checks.integer("sample", sample, 1, 1_000_000)
    _checks.word("nested", nested, ("json", "struct"))
    _checks.flag("examples", examples)
    if isinstance(collections, str):
        collections = [collections]
    ids = client.collections(
        None if collections is None else _checks.names("collections", collections)
    )
    found: dict[str, InferredSchema] = {}
    masks = Masks.of(drop_fields, hash_fields, None)
    seen = read(client, ids, lambda _name: Inference(nested, examples=examples), sample, masks)
    for name, inference in seen.items():
        text = inference.schema
        inference.warn_of_left_out(name)
        is_clear = text is None or Decoder(text, is_exact=False).names == _names(text)
        found[name] = InferredSchema(
            documents=inference.objects + inference.others + inference.binary,
            document_schema=text,
            prefix="" if is_clear else "doc_",
            fields=tuple(inference.fields),
        )
    return found


def _names(text: str) -> list[str]:
    from dcp_rs.replication.decoding import Decoder

    return list(Decoder(text, prefix="", is_exact=False).names)
