"""Errors with a complete text, because Spark passes on only the text of an exception."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.spark.options import as_written

if TYPE_CHECKING:
    from collections.abc import Iterator


class SparkReadError(DcpError):
    """A read failed in the driver or in a task.

    Attributes:
        code: Kind of the error, such as `COUCHBASE_DCP_CONNECT`. It is also in the text, in square
            brackets, because Spark passes on only the text of an exception.
    """

    code: str

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code
        self._message = message

    def __reduce__(self) -> tuple[type[SparkReadError], tuple[str, str]]:
        """Pickles with both arguments, which `Exception` alone would lose."""
        return type(self), (self.code, self._message)


def coded(error: DcpError, doing: str) -> SparkReadError:
    """Wraps an error of the engine, with its code and what was being done."""
    if isinstance(error, SparkReadError):
        return error
    if isinstance(error, ConfigError):
        as_written(error)
    code = f"COUCHBASE_DCP_{(error.code or 'failed').upper()}"
    return SparkReadError(code, f"{doing}: {error}")


@contextmanager
def options_coded() -> Iterator[None]:
    """Adds a code to errors about options, for functions that Spark calls."""
    try:
        yield
    except ConfigError as error:
        raise SparkReadError("COUCHBASE_DCP_CONFIG", str(error)) from error
