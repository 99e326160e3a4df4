"""What `dcp-rs run` does on SIGHUP: it reads its file again, and changes what can change."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from dcp_rs._logging import about
from dcp_rs.cli._logs import LOGS
from dcp_rs.cli._pipeline import PARAMETERS, File, called_as_in, file_of, is_given
from dcp_rs.exceptions import DcpError
from dcp_rs.replication import replicate
from dcp_rs.replication.controls import CHANGEABLE, Controls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    import click

_log = logging.getLogger("dcp_rs.replication")

_LEVELS = "log_levels"
_BY_NAME = {str(each.name): each for each in PARAMETERS}
_DEFAULTS = {name: each.default for name, each in inspect.signature(replicate).parameters.items()}


class Reload(Controls):
    """Reads the file of a command again when it is asked to.

    Args:
        context: Context of the command.
    """

    def __init__(self, context: click.Context) -> None:
        super().__init__()
        self._context = context
        self._is_asked = False

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        """Handles a signal."""
        self._is_asked = True

    def turn(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        """See `Controls`."""
        if not self._is_asked:
            return
        self._is_asked = False
        file = file_of(self._context)
        try:
            self._take(File(file.path), file, change)
        except DcpError as error:
            _log.error(
                "goes on as before, since the file was not taken: %s",
                error,
                extra=about("reload_failed", error=str(error)),
            )
        except Exception:
            # The target's: what was asked for is done once it can be written to.
            self._is_asked = True
            raise

    def _take(self, new: File, old: File, change: Callable[[Mapping[str, Any]], None]) -> None:
        differ = {
            name
            for name in old.values.keys() | new.values.keys()
            if old.values.get(name) != new.values.get(name)
        }
        differ |= {"tables"} if old.tables != new.tables else set()
        differ = {name for name in differ if not is_given(self._context, name)}
        changed = sorted(differ & {*CHANGEABLE, _LEVELS})
        refused = sorted(differ - {*CHANGEABLE, _LEVELS})
        with called_as_in(self._context, new):
            values = {name: self._value(name, new) for name in changed}
            levels = values.pop(_LEVELS, None)
            if values:
                change(values)
        if levels is not None:
            LOGS.change_levels(levels)
        old.take(new, changed)
        if refused:
            names = [old.called(name) or new.called(name) for name in refused]
            _log.error(
                "goes on with the old %s, which cannot change while it runs: start it again",
                ", ".join(names),
                extra=about("reload_refused", options=names),
            )
        _log.info(
            "%s was read again: %s",
            old.path.name,
            f"changes {', '.join(changed)}" if changed else "changes nothing",
            extra=about("reloaded", options=changed),
        )

    def _value(self, name: str, file: File) -> Any:
        """Returns the value that an option has in a file, or else by default."""
        value = _BY_NAME[name].process_value(self._context, file.values.get(name))
        return value if value is not None or name == _LEVELS else _DEFAULTS[name]
