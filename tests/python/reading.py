"""What several tests read."""

from pathlib import Path

TRACES = Path(__file__).resolve().parent.parent / "traces"


def rows_of(stream):
    return [row for batch in stream for row in batch.rows()]
