"""Names of tables that are made of names of collections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError

EACH_COLLECTION = "{scope}__{collection}"
"""The template that `tables="collection"` stands for."""

_FIELDS = frozenset({"scope", "collection"})


@dataclass(frozen=True)
class TableNames:
    """Says what the table of each collection is called.

    Attributes:
        templates: Template of the name by pattern of collections, of which the first that matches
            counts.
    """

    templates: Mapping[str, str]

    @classmethod
    def of(cls, tables: object) -> TableNames:
        """Reads the option `tables` of `dcp_rs.replicate`.

        Raises:
            ConfigError: A template or a pattern is wrong.
        """
        if isinstance(tables, str):
            template = EACH_COLLECTION if tables == "collection" else tables
            _check(template, may_be_plain=False)
            return cls({"*.*": template})
        if not isinstance(tables, Mapping):
            raise _checks.wrong_type("tables", tables, "a template or a mapping of patterns")
        if not tables:
            raise ConfigError("names no tables: give a pattern of collections", option="tables")
        for pattern, template in tables.items():
            _checks.text("tables", pattern)
            _checks.text("tables", template)
            if pattern.count(".") != 1:
                raise ConfigError(
                    f"{pattern!r} must be scope.collection, where * stands for any text",
                    option="tables",
                )
            _check(template, may_be_plain=not is_pattern(pattern))
        return cls(dict(tables))

    def table(self, collection: str) -> str | None:
        """Returns the name of a collection's table; `None` if it has none.

        Args:
            collection: Name of the collection, as `scope.collection`.
        """
        scope, _, name = collection.partition(".")
        for pattern, template in self.templates.items():
            if matches(pattern, collection):
                return template.format(scope=scope, collection=name)
        return None


def is_pattern(name: str) -> bool:
    """Whether a name stands for several collections."""
    return not {"*", "?"}.isdisjoint(name)


def matches(pattern: str, collection: str) -> bool:
    """Whether the pattern of a scope and of a collection matches a collection's full name."""
    parts = zip(pattern.split(".", 1), collection.split(".", 1), strict=True)
    return all(_matches(of, name) for of, name in parts)


def _matches(pattern: str, name: str) -> bool:
    expression = "".join({"*": ".*", "?": "."}.get(each, re.escape(each)) for each in pattern)
    return re.fullmatch(expression, name, re.DOTALL) is not None


def _check(template: str, *, may_be_plain: bool) -> None:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{template!r} is no template: {error}; a brace that belongs to the name is doubled",
            option="tables",
        ) from error
    fields = [field for _, field, _, _ in parts if field is not None]
    wrong = [field for field in fields if field not in _FIELDS]
    plain = [spec for _, field, spec, conversion in parts if field and (spec or conversion)]
    if wrong or plain:
        raise ConfigError(
            f"{template!r} has a field other than {{scope}} and {{collection}}; a brace that "
            "belongs to the name is doubled",
            option="tables",
        )
    if not template.strip() or not (fields or may_be_plain):
        raise ConfigError(
            f"{template!r} is the same for every collection: use {{collection}} and {{scope}}, "
            f"as in {EACH_COLLECTION}",
            option="tables",
        )
