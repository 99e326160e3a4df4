"""Names of tables that are made of names of collections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from string import Formatter
from typing import Any

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError

EACH_COLLECTION = "{scope}__{collection}"
"""The template that `tables="collection"` stands for."""

OPTIONS = (
    "document_schema",
    "key_type",
    "deletes",
    "on_error",
    "new_fields",
    "type_conflicts",
    "extra",
    "nested",
)
"""Options that each table can have its own of."""

_FIELDS = frozenset({"scope", "collection"})
# Under which a mapping of options has the template.
_TABLE = "table"


@dataclass(frozen=True)
class TableNames:
    """Says what the table of each collection is called.

    Attributes:
        templates: Template of the name by pattern of collections, of which the first that matches
            counts.
        options: Options of the tables of a pattern, by name.
    """

    templates: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
        templates: dict[str, str] = {}
        options: dict[str, Mapping[str, Any]] = {}
        for pattern, given in tables.items():
            _checks.text("tables", pattern)
            template, options[pattern] = _template_and_options(pattern, given)
            templates[pattern] = template
            if pattern.count(".") != 1:
                raise ConfigError(
                    f"{pattern!r} must be scope.collection, where * stands for any text",
                    option="tables",
                )
            _check(template, may_be_plain=not is_pattern(pattern))
        return cls(templates, options)

    def pattern(self, collection: str) -> str | None:
        """Returns the pattern that counts for a collection; `None` if none matches."""
        return next((each for each in self.templates if matches(each, collection)), None)

    def table(self, collection: str) -> str | None:
        """Returns the name of a collection's table; `None` if it has none.

        Args:
            collection: Name of the collection, as `scope.collection`.
        """
        scope, _, name = collection.partition(".")
        pattern = self.pattern(collection)
        if pattern is None:
            return None
        return self.templates[pattern].format(scope=scope, collection=name)


def _template_and_options(pattern: str, given: object) -> tuple[str, Mapping[str, Any]]:
    """Returns what a pattern of collections is mapped to.

    Raises:
        ConfigError: It is neither a template nor a mapping with one, or has an unknown option.
    """
    if not isinstance(given, Mapping):
        _checks.text("tables", given)
        return str(given), {}
    for name in given:
        if name == _TABLE or name in OPTIONS:
            continue
        near = get_close_matches(str(name), (_TABLE, *OPTIONS), n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join((_TABLE, *OPTIONS))}"
        raise ConfigError(f"{pattern!r} has no option {str(name)!r}: {hint}", option="tables")
    template = given.get(_TABLE, EACH_COLLECTION)
    _checks.text("tables", template)
    return str(template), {name: value for name, value in given.items() if name != _TABLE}


def is_pattern(name: str) -> bool:
    """Whether a name stands for several collections."""
    return not {"*", "?"}.isdisjoint(name)


def matches(pattern: str, collection: str) -> bool:
    """Whether the pattern of a scope and of a collection matches a collection's full name."""
    parts = zip(pattern.split(".", 1), collection.split(".", 1), strict=True)
    return all(_matches(of, name) for of, name in parts)


def qualified(name: str) -> str:
    """Returns the full name of a collection, which is in the scope `_default` without one."""
    return name if "." in name else f"_default.{name}"


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
