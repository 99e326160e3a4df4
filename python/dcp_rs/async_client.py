"""Connections to a bucket for asyncio."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
)

from dcp_rs import _dcp_rs, _deprecated, _keywords
from dcp_rs.client import (
    Client,
    collections_of,
    connect,
    plan_of,
    stream_options,
    with_nearest,
)
from dcp_rs.connection import Bucket, connection_options
from dcp_rs.exceptions import ConfigError
from dcp_rs.stores import CheckpointStore
from dcp_rs.stream import ChangeStream

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable

    from dcp_rs.plan import ReadPlan

# Options are declared only where they are documented.
_CONNECT = inspect.signature(connect)
_STREAM = inspect.signature(Client.stream)
_PLAN = inspect.signature(Client.plan)


class _Closes(Protocol):
    async def __aexit__(self, *_: object) -> None: ...


_T = TypeVar("_T")
_Made = TypeVar("_Made", bound=_Closes)
_P = ParamSpec("_P")
_Function = TypeVar("_Function", bound="Callable[..., object]")


class AsyncCall(Generic[_Made]):
    """A call whose result must be closed: await it, or use it with `async with`."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Coroutine[Any, Any, _Made]]) -> None:
        self._make = make
        self._made: _Made | None = None

    def __repr__(self) -> str:
        return "<dcp_rs call that has not begun: await it, or use it with `async with`>"

    def __enter__(self) -> NoReturn:
        """Refuses `with`."""
        raise TypeError("use `async with`, not `with`: opening and closing are awaited")

    def __exit__(self, *_: object) -> None:
        """Exists so that `with` reaches `__enter__`."""

    def __iter__(self) -> NoReturn:
        """Refuses to iterate."""
        raise TypeError("nothing is open yet: use `async with` or await it first, then `async for`")

    def __await__(self) -> Generator[Any, Any, _Made]:
        return self._make().__await__()

    async def __aenter__(self) -> _Made:
        self._made = made = await self._make()
        return made

    async def __aexit__(self, *exception: object) -> None:
        made, self._made = self._made, None
        if made is not None:
            await made.__aexit__(*exception)


async def _completed(start: Callable[[Callable[[], object]], _dcp_rs.Pending[_T]]) -> _T:
    """Waits for a call of the engine. If cancelled, it cancels the call and drops its result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    pending = start(partial(loop.call_soon_threadsafe, _settle, done))
    try:
        await done
        return pending.take()
    finally:
        pending.cancel()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _as_connect(
    _like: Callable[_P, Client],
) -> Callable[[Callable[..., AsyncCall[AsyncClient]]], Callable[_P, AsyncCall[AsyncClient]]]:
    return lambda function: _signed(function, _CONNECT)


def _as_stream(
    _like: Callable[Concatenate[Client, _P], ChangeStream],
) -> Callable[
    [Callable[..., AsyncCall[ChangeStream]]],
    Callable[Concatenate[AsyncClient, _P], AsyncCall[ChangeStream]],
]:
    return lambda function: _signed(function, _STREAM)


def _as_plan(
    _like: Callable[Concatenate[Client, _P], ReadPlan],
) -> Callable[
    [Callable[..., Coroutine[Any, Any, ReadPlan]]],
    Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, ReadPlan]],
]:
    return lambda function: _signed(function, _PLAN)


def _signed(function: _Function, signature: inspect.Signature) -> _Function:
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        return_annotation=inspect.signature(function).return_annotation
    )
    return function


def _arguments(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, Any]:
    if signature is _STREAM:
        _deprecated.take(kwargs, _deprecated.OF_STREAM)
    _keywords.check(name, signature.parameters, kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@_as_connect(connect)
def connect_async(*args: object, **kwargs: object) -> AsyncCall[AsyncClient]:
    """Connects to a bucket from asyncio, with the options of `dcp_rs.connect`.

    Use the result with `async with`, or await it:

        >>> import asyncio
        >>> async def read(cluster):
        ...     async with (
        ...         connect_async(
        ...             cluster.connection_string,
        ...             bucket="default",
        ...             username="Administrator",
        ...             password="password",
        ...         ) as client,
        ...         client.stream(until="now") as stream,
        ...     ):
        ...         return [row["key"] async for batch in stream for row in batch.rows()]
        >>> with EmbeddedCluster() as cluster:
        ...     _ = cluster.upsert("key", b"{}")
        ...     asyncio.run(read(cluster))
        ['key']

    It blocks neither the event loop nor a thread. A task that is cancelled while it connects leaves
    no connection behind.

    Raises:
        DcpError: The errors of `dcp_rs.connect`, when awaited.
    """
    arguments = _arguments("connect_async", _CONNECT, args, kwargs)

    async def make() -> AsyncClient:
        options = connection_options(arguments)
        start = partial(_dcp_rs.Client.connect_async, vars(options))
        return AsyncClient(options, await _completed(start))

    return AsyncCall(make)


class AsyncClient(Bucket):
    """A bucket to stream changes from with asyncio, returned by `dcp_rs.connect_async`.

    No method blocks the event loop, and cancelling a task at any `await` leaves neither a
    connection nor a stream behind. You can use a client from any event loop of the process that
    created it.
    """

    __slots__ = ()

    _connected_by = "connect_async"

    async def high_seqnos(self) -> dict[int, int]:
        """Fetches the highest seqno of each vBucket from the nodes.

        Raises:
            TimeoutError: A node did not answer within the connect timeout; the text says why.
            AuthenticationError: The server no longer accepts the user.
        """
        return await _completed(self._inner.high_seqnos_async)

    async def collections(self, collections: str | Iterable[str] | None = None) -> dict[str, int]:
        """Fetches the bucket's collections, as `dcp_rs.Client.collections` does, on a thread.

        If the task is cancelled, the thread still waits for the answers.

        Raises:
            ConfigError: A scope or collection that is named does not exist.
            TimeoutError: A node did not answer within the connect timeout; the text says why.
        """
        return await asyncio.to_thread(collections_of, self, collections)

    @_as_plan(Client.plan)
    async def plan(self, *args: object, **kwargs: object) -> ReadPlan:
        """Plans a bounded read, with the options of `dcp_rs.Client.plan`, on a thread.

        `dcp_rs.Partition.open` takes this client, too. It blocks until the stream is open, so call
        it with `asyncio.to_thread`, and read the stream with `async for`. If the task is cancelled,
        the thread still waits for the answers.

        Raises:
            DcpError: The errors of `dcp_rs.Client.plan`.
        """
        arguments = _arguments("AsyncClient.plan", _PLAN, (self, *args), kwargs)
        del arguments["self"]
        return await asyncio.to_thread(partial(plan_of, self, **arguments))

    @_as_stream(Client.stream)
    def stream(self, *args: object, **kwargs: object) -> AsyncCall[ChangeStream]:
        """Opens a stream of changes, with the options of `dcp_rs.Client.stream`.

        Use the result with `async with`, or await it. Either returns a `dcp_rs.ChangeStream` to
        read with `async for`. A `dcp_rs.CheckpointStore` is called on a thread.

        Raises:
            DcpError: The errors of `dcp_rs.Client.stream`, when awaited.
        """
        arguments = _arguments("AsyncClient.stream", _STREAM, (self, *args), kwargs)
        del arguments["self"]

        async def make() -> ChangeStream:
            is_stored = isinstance(arguments["start"], CheckpointStore)
            begin = partial(stream_options, dict(arguments), self)
            options, store = await asyncio.to_thread(begin) if is_stored else begin()
            try:
                inner = await _completed(partial(self._inner.stream_async, options))
            except ConfigError as error:
                better = await asyncio.to_thread(with_nearest, self, error)
                if better is error:
                    raise
                raise better from None
            stream = ChangeStream(inner, self.bucket_name)
            if store is not None:
                try:
                    await asyncio.to_thread(store.save, stream.checkpoint())
                except BaseException:
                    stream.close()
                    raise
            return stream

        return AsyncCall(make)

    async def close(self) -> None:
        """Closes the client and the streams it has opened, as `dcp_rs.Client.close` does.

        It is closed even if the task is cancelled in the meantime.
        """
        self._is_closed = True
        await _completed(self._inner.close_async)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
