"""An asyncio service that reacts to changes, and resumes after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import dcp_rs


async def react(changes: list[tuple[object, ...]]) -> None:
    """Handles changes. The stream waits until it returns."""
    await asyncio.sleep(0)
    for op, key in changes:
        print(f"{op} {key}", flush=True)


async def follow(client: dcp_rs.AsyncClient, store: dcp_rs.FileStore) -> None:
    """Handles each batch, then saves its checkpoint."""
    async with client.stream(start=store, columns=["op", "key"]) as stream:
        async for batch in stream:
            await react(list(batch.tuples()))
            store.save(batch.checkpoint)


async def main(connection_string: str, positions: str) -> None:
    """Runs until it gets SIGTERM or Ctrl-C."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    options = dcp_rs.ConnectionOptions(
        connection_string=connection_string,
        username="Administrator",
        password=os.environ.get("COUCHBASE_PASSWORD", "password"),
    )
    async with dcp_rs.connect_async(options) as client:
        following = asyncio.create_task(follow(client, dcp_rs.FileStore(positions)))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            await following  # raises what ended it
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    print("stopped", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CONNSTR POSITIONS")
    asyncio.run(main(*sys.argv[1:]))
