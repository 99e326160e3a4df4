"""What the heap of a process that runs for months keeps."""

from __future__ import annotations

import contextlib
import ctypes
import os

# Of glibc's `mallopt`: the largest block that goes into a fastbin.
_MXFAST = 1


def share_heap() -> None:
    """Has Arrow, unless it is loaded, use glibc's heap, so that `release_memory` returns it all.

    Arrow's own has a part for each thread, which only that thread returns.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def release_memory() -> None:
    """Returns to the system what Arrow's pool and glibc keep.

    glibc keeps what was freed below a block that is in use, in a heap for every few threads: some
    MiB more after each hang of a target.
    """
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    # Another libc has no such file or function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def turn_off_fastbins() -> None:
    """Has glibc keep no fastbins, its lists of small blocks that were freed.

    Whenever a large block is freed, glibc empties them all. librdkafka frees a large block for each
    record and three small ones for each header, so that most of its time went into that.
    """
    # Another libc has no such file or function, and needs none.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MXFAST, 0)
