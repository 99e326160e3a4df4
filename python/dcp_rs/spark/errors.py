"""Errors whose text says everything: only the text of an exception survives Spark."""

from __future__ import annotations

from dcp_rs.exceptions import DcpError


class SparkReadError(DcpError):
    """A read failed in the driver or in a task.

    Attributes:
        code: What went wrong, as in `COUCHBASE_DCP_CONNECT`. It is also in the text, in square
            brackets, because Spark hands on nothing but the text of an exception.
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
    return SparkReadError(f"COUCHBASE_DCP_{(error.code or 'failed').upper()}", f"{doing}: {error}")


def missing_library(error: ImportError) -> ImportError:
    """Says which extra brings a library that is missing."""
    return ImportError(
        f"dcp_rs.spark needs pyspark and pyarrow ({error}): "
        'install them with pip install "dcp-rs[spark]"'
    )
