"""Records of `logging`: their events and fields, and those that the engine's thread hands over.

A record about something that has a name has the attributes `event`, a word that does not change
between releases, and `fields`, a mapping.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "dcp_rs"


def about(event: str, **fields: object) -> dict[str, object]:
    """Returns the `extra` of a record: its event and its fields."""
    return {"event": event, "fields": fields}


def levels() -> list[tuple[str, int]]:
    """Returns the effective level of the package's logger and of each logger below it."""
    manager = logging.Logger.manager
    names = [name for name in list(manager.loggerDict) if name.startswith(f"{_NAME}.")]
    return [(_NAME, _level(_nearest(_NAME)))] + [
        (name, _level(logger))
        for name in names
        if isinstance(logger := manager.loggerDict.get(name), logging.Logger)
    ]


def _nearest(name: str) -> logging.Logger:
    logger = logging.Logger.manager.loggerDict.get(name)
    return logger if isinstance(logger, logging.Logger) else logging.getLogger()


def _level(logger: logging.Logger) -> int:
    # `disabled` is ignored: it does not apply to the loggers below.
    return max(logger.getEffectiveLevel(), logger.manager.disable + 1)


def hand_on(
    name: str,
    level: int,
    place: tuple[str | None, int | None, float],
    told: tuple[str, str | None, Mapping[str, object]],
) -> None:
    """Logs a record of the engine.

    Args:
        name: The logger.
        level: The level.
        place: File and line, and the time in seconds since 1970.
        told: Message, event and fields.
    """
    logger = logging.getLogger(name)
    if not logger.isEnabledFor(level):
        return
    (path, line, created), (message, event, fields) = place, told
    record = logger.makeRecord(name, level, path or "", line or 0, message, (), None)
    since = record.created - created
    record.created = created
    record.msecs = float(int(created * 1000) % 1000)
    record.relativeCreated -= since * 1000
    # The record comes from another thread.
    record.threadName = _NAME
    record.event, record.fields = event, fields
    logger.handle(record)


def tell_lost(count: int) -> None:
    """Logs that records were lost."""
    logging.getLogger(_NAME).warning(
        "%d log records were lost: they came faster than the handlers took them; raise the level"
        " of the logger %s, or hand records to a queue",
        count,
        _NAME,
        extra=about("log_lost", count=count),
    )
