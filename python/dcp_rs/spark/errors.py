"""Errors with a complete text, because Spark passes on only the text of an exception."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TYPE_CHECKING

from dcp_rs.exceptions import ConfigError, DcpError
from dcp_rs.spark.options import as_written

if TYPE_CHECKING:
    from types import TracebackType


# What Spark makes possible, by the code of an error.
_ADVICE = {
    "filter_changed": ". To back-fill only what is new, keep this query as it was, and read the "
    "other collections with a query and a checkpoint of their own"
}


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

    def again(self) -> SparkReadError:
        """Returns the same error, as if it had not been raised."""
        return type(self)(self.code, self._message)

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
    return SparkReadError(code, f"{doing}: {error}{_ADVICE.get(error.code or '', '')}")


class options_coded(ContextDecorator):  # noqa: N801 - reads as a function
    """Has errors say what is wrong first and last, with a code, for functions that Spark calls.

    The text of Spark's error is a traceback. If it has the cause, it begins with it: that is the
    same error here, without the frames that led to it.
    """

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raises an error of ours anew."""
        if isinstance(error, ConfigError):
            error = SparkReadError("COUCHBASE_DCP_CONFIG", str(error))
        if isinstance(error, SparkReadError):
            raise error.again() from error.again()
