"""The display of `dcp-rs top`: samples of a stream, and their picture."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import RenderableType

    from dcp_rs.client import Client
    from dcp_rs.stream import ChangeStream, StreamEvent, StreamStats, VbucketStats

_HISTORY = 60
_MOST_BEHIND = 5
_EVENTS = 6
_BARS = "▁▂▃▄▅▆▇█"
_QUIET = frozenset({"opened"})
_WELL = frozenset({"streaming", "complete"})
_STATES = {
    "streaming": "green", "complete": "green", "opening": "yellow", "backing_off": "yellow",
    "failed": "red",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NodeSample:
    """A node, by its vBuckets."""

    node: str
    states: Counter[str]
    writes_per_second: float
    lag: int | None

    @property
    def vbuckets(self) -> int:
        """How many vBuckets of the stream it holds."""
        return self.states.total()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Figures at one moment; rates are since the previous sample."""

    bucket: str
    elapsed: float
    rows: int
    rows_per_second: float
    writes_per_second: float
    high_seqno: int
    lag: int | None
    stats: StreamStats
    nodes: list[NodeSample]
    behind: list[tuple[int, str, int, int, int | None]]
    history: tuple[float, ...]
    events: tuple[tuple[str, StreamEvent], ...] = field(default=())

    def record(self) -> dict[str, object]:
        """Returns it as JSON values."""
        names = ("opening", "streaming", "backing_off", "complete", "failed")
        return {
            "bucket": self.bucket,
            "elapsed": round(self.elapsed, 3),
            "writes_per_second": round(self.writes_per_second, 1),
            "rows_per_second": round(self.rows_per_second, 1),
            "rows": self.rows,
            "high_seqno": self.high_seqno,
            "lag": self.lag,
            "states": {name: getattr(self.stats, name) for name in names},
            "connections": self.stats.connections,
            "reconnects": self.stats.reconnects,
            "buffered_bytes": self.stats.buffered_bytes,
            "nodes": [
                {
                    "node": node.node,
                    "vbuckets": node.vbuckets,
                    "states": dict(node.states),
                    "writes_per_second": round(node.writes_per_second, 1),
                    "lag": node.lag,
                }
                for node in self.nodes
            ],
        }


class Monitor:
    """Takes samples of a stream."""

    def __init__(
        self,
        client: Client,
        stream: ChangeStream,
        reader: Callable[[], dict[int, int]] | None = None,
    ) -> None:
        self._client = client
        self._stream = stream
        # Positions of another reader, whose lag is shown instead of the stream's.
        self._reader = reader
        # Writes before the first sample are not part of any rate.
        self._high = client.high_seqnos()
        self._at = time.monotonic()
        self._rows = stream.stats().rows
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._events: deque[tuple[str, StreamEvent]] = deque(maxlen=_EVENTS)

    def sample(self) -> Sample:
        """Takes a sample."""
        now, stats = time.monotonic(), self._stream.stats()
        seconds = max(now - self._at, 1e-3)
        shown = self._stream.vbucket_stats()
        high = {
            each.vbucket: max(self._high.get(each.vbucket, 0), each.high_seqno or 0, each.seqno)
            for each in shown
        }
        written = {vb: max(seqno - self._high.get(vb, seqno), 0) for vb, seqno in high.items()}
        read = self._positions(shown)
        # What the server has now is not known of those that are disconnected.
        lags = {
            vb: None if each.is_disconnected else max(high[vb] - read.get(vb, 0), 0)
            for each in shown
            for vb in [each.vbucket]
        }
        rate = sum(written.values()) / seconds
        self._history.append(rate)
        clock = time.strftime("%H:%M:%S")
        events = (each for each in self._stream.events() if each.kind not in _QUIET)
        self._events.extend((clock, each) for each in events)
        rows_per_second = (stats.rows - self._rows) / seconds
        self._high, self._at, self._rows = self._high | high, now, stats.rows
        late = [each for each in shown if lags[each.vbucket] != 0 or each.state not in _WELL]
        late.sort(key=lambda each: (-(lags[each.vbucket] or 0), each.vbucket))
        return Sample(
            bucket=self._client.bucket_name,
            elapsed=stats.elapsed,
            rows=stats.rows,
            rows_per_second=rows_per_second,
            writes_per_second=rate,
            high_seqno=sum(high.values()),
            lag=_total(lags.values()),
            stats=stats,
            nodes=self._nodes(shown, written, lags, seconds),
            behind=[
                (vb, each.state, read.get(vb, 0), high[vb], lags[vb])
                for each in late[:_MOST_BEHIND]
                for vb in [each.vbucket]
            ],
            history=tuple(self._history),
            events=tuple(self._events),
        )

    def _positions(self, shown: list[VbucketStats]) -> dict[int, int]:
        if self._reader is not None:
            return self._reader()
        return {each.vbucket: each.seqno for each in shown}

    def _nodes(
        self,
        shown: list[VbucketStats],
        written: dict[int, int],
        lags: dict[int, int | None],
        seconds: float,
    ) -> list[NodeSample]:
        states = {each.vbucket: each.state for each in shown}
        return [
            NodeSample(
                node=node,
                states=Counter(states[vb] for vb in ours),
                writes_per_second=sum(written[vb] for vb in ours) / seconds,
                lag=_total(lags[vb] for vb in ours),
            )
            for node, held in sorted(self._client.vbuckets_by_node().items())
            for ours in [[vb for vb in held if vb in states]]
        ]


def _total(lags: Iterable[int | None]) -> int | None:
    """Returns the sum; `None` if one is unknown."""
    known = list(lags)
    return None if None in known else sum(filter(None, known))


# ----- the picture -----


def picture(sample: Sample) -> RenderableType:
    """Draws a sample."""
    parts = [_head(sample), _nodes(sample)]
    if sample.behind:
        parts.append(_behind(sample))
    if sample.events:
        parts.append(_events(sample))
    return Group(*parts)


def live_picture(sample: Sample) -> RenderableType:
    """Draws a sample, and how to quit."""
    return Group(picture(sample), Text("q quits", style="dim"))


def _head(sample: Sample) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    for _ in range(4):
        table.add_column()
    stats = sample.stats
    # Less than the writes of one second is normal.
    is_normal = sample.lag is not None and sample.lag <= sample.writes_per_second
    lag_style = "green" if is_normal else "red"
    table.add_row(
        _fact("written", f"{sample.writes_per_second:,.0f}/s"),
        _fact("read", f"{sample.rows_per_second:,.0f}/s"),
        _fact("lag", _lag(sample.lag), lag_style),
        _fact("changes", f"{sample.rows:,}"),
    )
    table.add_row(
        _fact("connections", f"{stats.connections}"),
        _fact("reconnects", f"{stats.reconnects}", "yellow" if stats.reconnects else "default"),
        _fact("buffered", f"{stats.buffered_bytes / 1024:,.0f} KiB"),
        _states(sample),
    )
    title = f"{sample.bucket}  {_clock(sample.elapsed)}"
    body = Group(table, Text(_spark(sample.history), style="cyan"))
    return Panel(body, title=Text(title), title_align="left", box=box.ROUNDED)


def _fact(name: str, value: str, style: str = "default") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, f"bold {style}"))


def _states(sample: Sample) -> Text:
    parts = []
    for name, style in _STATES.items():
        count = getattr(sample.stats, name)
        if count:
            parts.append((f"{count} {name.replace('_', ' ')}  ", style))
    return Text.assemble(*parts)


def _nodes(sample: Sample) -> RenderableType:
    table = _table("NODE", "VBUCKETS", "STATES", "WRITTEN/S", "LAG")
    for node in sample.nodes:
        states = ", ".join(
            f"{count} {state.replace('_', ' ')}" for state, count in sorted(node.states.items())
        )
        table.add_row(
            Text(node.node),
            f"{node.vbuckets}",
            states,
            f"{node.writes_per_second:,.0f}",
            _lag(node.lag),
        )
    return table


def _behind(sample: Sample) -> RenderableType:
    table = _table("MOST BEHIND", "SEQNO", "STATE", "HIGH SEQNO", "LAG")
    for vbucket, state, seqno, high, lag in sample.behind:
        table.add_row(
            f"vBucket {vbucket}",
            f"{seqno:,}",
            Text(state.replace("_", " "), style=_STATES.get(state, "default")),
            f"{high:,}",
            _lag(lag),
        )
    return table


def _lag(lag: int | None) -> str:
    return "unknown" if lag is None else f"{lag:,}"


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    for at, name in enumerate(names):
        table.add_column(name, justify="left" if at in (0, 2) else "right", ratio=1, no_wrap=True)
    return table


def _events(sample: Sample) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for clock, event in sample.events:
        where = event.node or ("" if event.vbucket is None else f"vBucket {event.vbucket}")
        table.add_row(
            Text(clock, style="dim"),
            Text(event.kind.replace("_", " "), style="yellow"),
            Text(where),
            Text(event.message),
        )
    return table


def _spark(history: tuple[float, ...]) -> str:
    highest = max(history, default=0) or 1
    return "".join(_BARS[round(rate / highest * (len(_BARS) - 1))] for rate in history)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
