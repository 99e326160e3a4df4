"""The engine's interface to `logging`, called by its thread for log records."""

from __future__ import annotations

import logging

_NAME = "dcp_rs"


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
    name: str, level: int, place: tuple[str | None, int | None], message: str, created: float
) -> None:
    """Logs a record of the engine, created at `created` in seconds since 1970."""
    logger = logging.getLogger(name)
    if not logger.isEnabledFor(level):
        return
    path, line = place
    record = logger.makeRecord(name, level, path or "", line or 0, message, (), None)
    since = record.created - created
    record.created = created
    record.msecs = float(int(created * 1000) % 1000)
    record.relativeCreated -= since * 1000
    # The record comes from another thread.
    record.threadName = _NAME
    logger.handle(record)


def tell_lost(count: int) -> None:
    """Logs that records were lost."""
    logging.getLogger(_NAME).warning(
        "%d log records were lost: they came faster than the handlers took them; raise the level"
        " of the logger %s, or hand records to a queue",
        count,
        _NAME,
    )
