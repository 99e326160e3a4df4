"""Waiting for figures that nodes are asked for."""

import time


def until(is_so, patience=20):
    """Waits until something is so, without asking all the time."""
    deadline = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.02)
