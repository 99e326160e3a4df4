"""The columns of one table's documents: how they are decided, and how they grow."""

from __future__ import annotations

import difflib
import json
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc

from dcp_rs._logging import about
from dcp_rs.documents import MALFORMED_FIELDS, DocumentSchema, as_ddl
from dcp_rs.exceptions import ConfigError, DataError
from dcp_rs.options import Masks
from dcp_rs.replication.changes import Layout
from dcp_rs.replication.decoding import (
    EXTRA,
    HAS_MALFORMED,
    HAS_UNMAPPED,
    IS_MALFORMED,
    Decoded,
    Decoder,
    Inference,
)
from dcp_rs.replication.state import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_rs.replication.state import Mode, Nested, State

_log = logging.getLogger("dcp_rs.replication")
_log_of_documents = logging.getLogger("dcp_rs.documents")

INFER = "infer"
"""The `document_schema` that stands for one which is inferred."""

NewFields = Literal["evolve", "ignore", "reject"]
TypeConflicts = Literal["evolve", "null", "reject"]

# A change of a column's type may have the next one need another: a fraction, then a text.
_ROUNDS = 4
# Documents of a commit whose columns are tried one by one.
_MAX_TRIED = 200
# Documents after which a column that none of them has is warned of, as by streams.
_ENOUGH = 1000
# Names of fields in the reason of a reject.
_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a table does with documents.

    Attributes:
        document_schema: Columns to decode documents to; `infer` to infer them; `None` for JSON.
        key_type: Type of the column `key`.
        deletes: What becomes of the row of a removed document.
        new_fields: What to do with a field that is no column.
        type_conflicts: What to do with a value that its column does not hold.
        extra: Whether what no column holds has a column.
        nested: What becomes of objects within documents.
        masks: Which fields of documents are masked.
        more: Other columns of the stream that rows have.
        reserved: Other names that no column of documents has.
    """

    document_schema: str | pa.Schema | DocumentSchema | None = None
    key_type: Literal["string", "binary"] = "string"
    deletes: Literal["remove", "mark"] = "remove"
    new_fields: NewFields | None = None
    type_conflicts: TypeConflicts | None = None
    extra: Literal["drop", "column"] = "drop"
    nested: Nested | None = None
    masks: Masks = field(default_factory=Masks)
    more: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks that the options do not contradict each other.

        Raises:
            ConfigError: They do.
        """
        given = {
            "new_fields": self.new_fields,
            "type_conflicts": self.type_conflicts,
            "extra": None if self.extra == "drop" else self.extra,
            "nested": self.nested,
        }
        if self.document_schema is None:
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(
                        "applies to columns of documents: set document_schema, to infer or to"
                        " columns",
                        option=name,
                    )
        text = self._text
        if text is not None and text != INFER and difflib.get_close_matches(text, [INFER], 1, 0.7):
            raise ConfigError(
                f"{text!r} is no list of columns: did you mean {INFER}?", option="document_schema"
            )
        if self.nested is not None and not self.infers:
            raise ConfigError(
                "applies to schemas that are inferred: set document_schema to infer, or declare"
                " the types",
                option="nested",
            )
        given_schema = self.document_schema
        if (
            isinstance(given_schema, DocumentSchema)
            and self.evolves
            and (given_schema.prefix or self._on_malformed != "null")
        ):
            raise ConfigError(
                "a schema that is inferred or evolves has no prefix, and on_malformed is null:"
                " leave them out",
                option="document_schema",
            )

    @property
    def infers(self) -> bool:
        """Whether the schema is inferred."""
        return self._text == INFER

    @property
    def _text(self) -> str | None:
        """The schema, if it is given as text."""
        given = self.document_schema
        text = given.schema if isinstance(given, DocumentSchema) else given
        return text if isinstance(text, str) else None

    @property
    def is_own(self) -> bool:
        """Whether the columns of documents are decided for each table."""
        return (
            self.infers
            or self.extra == "column"
            or self.new_fields is not None
            or self.type_conflicts is not None
        )

    @property
    def adds_fields(self) -> bool:
        """Whether a field that is new becomes a column."""
        return self._new_fields == "evolve"

    @property
    def widens_types(self) -> bool:
        """Whether a column's type follows the values."""
        return self._type_conflicts == "evolve"

    @property
    def evolves(self) -> bool:
        """Whether columns change after they were decided."""
        return self.adds_fields or self.widens_types

    def check_shared(self) -> None:
        """Checks that several processes can write the table, each a share of the bucket.

        Raises:
            ConfigError: Each would decide its columns.
        """
        deciding = {
            "document_schema": self.infers,
            "new_fields": self.adds_fields,
            "type_conflicts": self.widens_types,
        }
        for option, decides in deciding.items():
            if decides:
                raise ConfigError(
                    "each share would decide the columns by its own documents: declare them, as"
                    " dcp-rs schema prints them, or leave out share",
                    option=option,
                )

    @property
    def rejects(self) -> int:
        """Flags of documents that are rejected."""
        of_fields = HAS_UNMAPPED if self._new_fields == "reject" else 0
        of_types = HAS_MALFORMED | IS_MALFORMED if self._type_conflicts == "reject" else 0
        return of_fields | of_types

    @property
    def _new_fields(self) -> NewFields:
        return self.new_fields or ("evolve" if self.infers else "ignore")

    @property
    def _type_conflicts(self) -> TypeConflicts:
        return self.type_conflicts or ("evolve" if self.infers else "null")

    @property
    def _on_malformed(self) -> Literal["null", "fail", "column"]:
        given = self.document_schema
        return given.on_malformed if isinstance(given, DocumentSchema) else "null"

    @property
    def base(self) -> str:
        """The schema as it was given, as text."""
        given = self.document_schema
        text = given.schema if isinstance(given, DocumentSchema) else given
        return as_ddl(text) or ""

    @property
    def given_fields(self) -> set[str]:
        """Fields of documents that columns were given for, but those that are dropped."""
        if self.infers or not self.base:
            return set()
        names = Decoder(self.base, prefix="", is_exact=False).names
        return set(names) - set(self.masks.drop_fields)

    @property
    def prefix(self) -> str | None:
        """What the names of columns begin with; `None` if names are found that are free."""
        given = self.document_schema
        if isinstance(given, DocumentSchema) and given.prefix:
            return given.prefix
        return None if self.infers or self.evolves else ""

    def layout(self, mode: Mode) -> Layout:
        """Returns what a stream reads, with the layout of tables that have no schema of their own.

        Raises:
            ConfigError: The schema is not one, or contradicts the columns.
        """
        if not self.infers and self.document_schema is not None:
            # Checks the names and types of columns that are given.
            given = self._layout(mode, self.document_schema)
            if not self.is_own:
                return given
        return self.text_layout(mode)

    def text_layout(self, mode: Mode) -> Layout:
        """Returns the layout of a stream that has documents as text."""
        return self._layout(mode, None)

    def _layout(
        self, mode: Mode, document_schema: str | pa.Schema | DocumentSchema | None
    ) -> Layout:
        return Layout.of(
            mode, document_schema, self.key_type, self.deletes, self.masks, more=self.more
        )

    def decided(self, mode: Mode, decision: Decision | None) -> Layout:
        """Returns the layout of a table for which a decision was made, or none yet."""
        text = self.text_layout(mode)
        decoder = None
        if decision is not None and decision.fields is not None:
            decoder = Decoder(
                decision.fields,
                decision.nested,
                prefix=self.prefix,
                is_exact=self.widens_types,
                keeps_rest=self._on_malformed == "null",
                reserved=self.reserved,
            )
        is_kept = self.extra == "column" or self._on_malformed == "column"
        return text.decided(
            mode,
            decision,
            decoder,
            keeps_extra=self.extra == "column",
            keeps_malformed=is_kept,
        )

    def inference(self) -> Inference:
        """Returns what notes the documents that columns are inferred from."""
        return Inference(self.nested or "json", reserved=self.reserved)

    def decide(self, mode: Mode, seen: Inference | None = None) -> Decision | None:
        """Makes the decision for a table; `None` if nothing is known of its documents.

        Args:
            mode: `table`, `log` or `history`.
            seen: What documents have, if the schema is inferred.
        """
        if self.document_schema is None:
            return Decision(base="", kind="json")
        if not self.infers:
            return Decision(base=self.base, kind="fields", fields=self.base)
        return None if seen is None else self._inferred(mode, seen)

    def _inferred(self, mode: Mode, seen: Inference) -> Decision | None:
        decision = Decision(base=INFER, kind="json", nested=self.nested or "json")
        if seen.objects:
            fields = seen.schema
            return None if fields is None else replace(decision, kind="fields", fields=fields)
        # A document that is not JSON cannot be masked, and is malformed.
        is_masked = self.masks != Masks()
        if seen.binary and not seen.others and mode != "log" and not is_masked:
            return replace(decision, kind="binary")
        return decision if seen.others or seen.binary else None


class OwnSchema:
    """The columns of one table's documents.

    Args:
        contract: What the table does with documents.
        mode: `table`, `log` or `history`.
        widens: Whether the target can change a column from one type to another, and keep what is in
            it.
    """

    def __init__(
        self,
        contract: Contract,
        mode: Mode,
        widens: Callable[[pa.DataType, pa.DataType], bool],
    ) -> None:
        self.contract = contract
        self._mode: Mode = mode
        self._widens = widens
        self.decision: Decision | None = None
        self.layout = contract.decided(mode, None)
        # Columns that were given and that no document had, until they have been warned of.
        self._missing = contract.given_fields
        self._documents = 0

    def restore(self, state: State | None) -> None:
        """Takes the decision of a state.

        Raises:
            ConfigError: It was made with other options.
        """
        decision = None if state is None else state.decision
        contract = self.contract
        if decision is None and not contract.infers:
            decision = contract.decide(self._mode)
        elif decision is not None and contract.infers:
            asked = contract.nested or decision.nested
            if asked != decision.nested:
                raise ConfigError(
                    f"the table was made with {decision.nested}: leave it out, or replicate to a"
                    " new table",
                    option="nested",
                )
        elif decision is not None and decision.base != contract.base:
            decision = contract.decide(self._mode)
        self._take(decision)

    def decide(self, seen: Inference) -> None:
        """Makes the decision from what documents were seen to have, unless it was made."""
        if self.decision is None:
            self._take(self.contract.decide(self._mode, seen))

    def _take(self, decision: Decision | None) -> None:
        self.decision = decision
        self.layout = self.contract.decided(self._mode, decision)

    def begin(self) -> None:
        """Begins a generation, which has all documents."""
        if self.decision is not None:
            self._take(replace(self.decision, left_fields=False, left_values=False))

    def why_anew(self, decision: Decision | None) -> str | None:
        """Says why what was left out has the table loaded again."""
        if decision is None or self._mode != "table":
            return None
        if self.contract.adds_fields and decision.left_fields:
            return "fields were left out that become columns"
        if self.contract.widens_types and decision.left_values:
            return "values were left out that columns are widened for"
        return None

    def fit(self, changes: pa.Table) -> Decoded | None:
        """Decodes the documents of changes; the columns are decided and grow as they need.

        Raises:
            DataError: A document does not fit, and that is to end the replication.
        """
        if self.decision is None:
            seen = self.contract.inference()
            seen.add(changes)
            self.decide(seen)
        decoder = self.layout.decoder
        if decoder is None or self.decision is None:
            return None
        decoded = decoder.decode(changes)
        for _ in range(_ROUNDS):
            fields = self._grown(decoder, changes, decoded)
            if fields is None:
                break
            self._take(replace(self.decision, fields=fields))
            _log.info("columns change to %s", fields, extra=about("columns_changed"))
            decoder = self.layout.decoder or decoder
            decoded = decoder.decode(changes)
        self._note(decoded)
        self._missing &= set(decoded.missing)
        self._documents += decoded.documents
        if self._documents >= _ENOUGH:
            self.read_enough()
        if self.contract._on_malformed == "fail":  # noqa: SLF001 - of this module
            _refuse(changes, decoded)
        return decoded

    def read_enough(self) -> None:
        """Warns of columns that no document had so far, if there were documents."""
        missing, documents = sorted(self._missing), self._documents
        if not documents:
            return
        self._missing = set()
        for column in missing:
            _log_of_documents.warning(
                "no document has the field of the column %s, which is null in every row: is it"
                " spelt as in the documents? Names are case-sensitive",
                column,
                extra=about("column_unmatched", column=column, documents=documents),
            )

    def _grown(self, decoder: Decoder, changes: pa.Table, decoded: Decoded) -> str | None:
        """Returns the schema that holds the documents, too; `None` if it is the same."""
        contract = self.contract
        calls = (HAS_UNMAPPED if contract.adds_fields else 0) | (
            HAS_MALFORMED if contract.widens_types else 0
        )
        only = decoded.has(calls) if calls else None
        if only is None or not pc.any(only).as_py():
            return None
        widens = contract.widens_types
        grown = decoder.grown(changes, only, adds_fields=contract.adds_fields, widens_types=widens)
        if widens and not self._can(decoder, grown):
            # What the target cannot change stays as it is.
            grown = self._possible(decoder, changes, only)
        return None if grown == decoder.schema else grown

    def _can(self, decoder: Decoder, grown: str) -> bool:
        """Whether the target can change the columns to those of a schema."""
        new = self._decoder_of(grown)
        wanted = {each.name: each.type for each in new.fields}
        return all(
            each.type == wanted.get(each.name) or self._may(each.type, wanted.get(each.name))
            for each in decoder.fields
        )

    def _may(self, old: pa.DataType, new: pa.DataType | None) -> bool:
        return new is not None and self._widens(old, new)

    def _decoder_of(self, fields: str) -> Decoder:
        if self.decision is None:
            raise AssertionError("a decision was made")
        found = self.contract.decided(self._mode, replace(self.decision, fields=fields)).decoder
        if found is None:
            raise AssertionError("a schema has a decoder")
        return found

    def _possible(self, decoder: Decoder, changes: pa.Table, only: pa.Array) -> str:
        """Returns the schema with the columns that the target can add and change."""
        fields, current = decoder.schema, decoder
        if self.contract.adds_fields:
            fields = decoder.grown(changes, only, adds_fields=True, widens_types=False)
            if not self._can(decoder, fields):
                fields = decoder.schema
            current = self._decoder_of(fields)
        # One document after the other, since each may need columns of other types.
        for index in pc.indices_nonzero(only).to_pylist()[:_MAX_TRIED]:
            row = changes.slice(index, 1)
            grown = current.grown(row, pa.array([True]), adds_fields=False, widens_types=True)
            if grown != fields and self._can(current, grown):
                fields, current = grown, self._decoder_of(grown)
        return fields

    def _note(self, decoded: Decoded) -> None:
        """Notes that something was left out, for the time when that becomes columns."""
        if self.decision is None:
            return
        contract = self.contract
        left_fields = not contract.adds_fields and bool(pc.any(decoded.has(HAS_UNMAPPED)).as_py())
        left_values = not contract.widens_types and bool(pc.any(decoded.has(HAS_MALFORMED)).as_py())
        noted = replace(
            self.decision,
            left_fields=self.decision.left_fields or left_fields,
            left_values=self.decision.left_values or left_values,
        )
        if noted != self.decision:
            self.decision = noted

    def rejected(self, decoded: Decoded | None) -> dict[int, str]:
        """Returns why documents are rejected, by their index."""
        if decoded is None or not self.contract.rejects:
            return {}
        is_rejected = decoded.has(self.contract.rejects)
        return {
            index: _reason(decoded, index, self.contract.rejects)
            for index in pc.indices_nonzero(is_rejected).to_pylist()
        }


def _reason(decoded: Decoded, index: int, calls: int) -> str:
    flags = decoded.flags[index].as_py() & calls
    if flags & (HAS_MALFORMED | IS_MALFORMED):
        note = json.loads(decoded.columns[MALFORMED_FIELDS][index].as_py() or "[{}]")[0]
        path = note.get("path") or "the document"
        return f"{path} does not fit: {note.get('reason', 'its type')}"
    extra = decoded.columns[EXTRA][index].as_py()
    names = sorted(json.loads(extra)) if extra else []
    shown = ", ".join(names[:_NAMES]) + (", …" if len(names) > _NAMES else "")
    return f"fields are not in the schema: {shown}"


def _refuse(changes: pa.Table, decoded: Decoded) -> None:
    wrong = pc.or_(decoded.has(HAS_MALFORMED), decoded.has(IS_MALFORMED))
    for index in pc.indices_nonzero(wrong).to_pylist():
        row = changes.select(["vbucket", "seqno"]).slice(index, 1).to_pylist()[0]
        error = DataError(
            f"vBucket {row['vbucket']} seqno {row['seqno']}:"
            f" {_reason(decoded, index, HAS_MALFORMED | IS_MALFORMED)}"
        )
        error.vbucket, error.seqno = row["vbucket"], row["seqno"]
        raise error
