"""Links of workers: flows share each end of a link equally."""

from collections import deque
from collections.abc import Callable

from kvmesh.simulator.virtual_clock import VirtualClock

Done = Callable[[], None]
_ROUNDS = 3
_TOLERANCE = 0.02


class _Flow:
    """The transfers from one worker to another, one after the other, as on one connection."""

    __slots__ = ("down", "left", "queue", "rate", "since", "turn", "up")

    def __init__(self, up: "LinkEnd", down: "LinkEnd") -> None:
        self.up = up
        self.down = down
        self.queue: deque[tuple[int, Done]] = deque()
        self.left = 0.0
        self.rate = 0.0
        self.since = 0.0
        self.turn = 0  # a planned end with another turn is void


class LinkEnd:
    """One direction of a worker's link; `sent` counts the bytes of transfers that ended.

    `level` is the rate of each flow that is not slower because of its other end.
    """

    __slots__ = ("bytes_per_s", "flows", "level", "sent")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = self.level = bytes_per_s
        self.flows: dict[_Flow, None] = {}
        self.sent = 0

    def fill(self) -> bool:
        """Share the rate anew, by the levels of the other ends; True if the level has changed."""
        left, flows = self.bytes_per_s, len(self.flows)
        level = left
        for other in sorted([(f.down if f.up is self else f.up).level for f in self.flows]):
            if other * flows >= left:
                level = left / flows
                break
            left -= other
            flows -= 1
        changed = abs(level - self.level) > _TOLERANCE * self.level
        self.level = level
        return changed


class FairNetwork:
    """Flows share links as TCP connections do: each gets an equal part of its narrowest link.

    The rates approach those of max-min fairness: a change is followed for `_ROUNDS` links around
    it and where it is more than `_TOLERANCE`.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._flows: dict[tuple[LinkEnd, LinkEnd], _Flow] = {}

    def transfer(self, up: LinkEnd, down: LinkEnd, size: int, done: Done) -> None:
        """Send `size` bytes behind those queued between the same ends; then call `done`."""
        flow = self._flows.get((up, down))
        if flow is None:
            flow = self._flows[up, down] = _Flow(up, down)
        flow.queue.append((size, done))
        if len(flow.queue) == 1:
            flow.left, flow.since = size, self._clock.now
            up.flows[flow] = down.flows[flow] = None
            self._share(up, down)

    def close(self, end: LinkEnd) -> None:
        """Stop all flows of a worker's direction; their transfers never end."""
        for flow in list(end.flows):
            self.cut(flow.up, flow.down)

    def cut(self, up: LinkEnd, down: LinkEnd) -> None:
        """Stop the flow between two ends, if there is one; its transfers never end."""
        if (flow := self._flows.get((up, down))) is not None:
            flow.queue.clear()
            flow.turn += 1
            self._remove(flow)

    def reshape(self, end: LinkEnd, bytes_per_s: float) -> None:
        """The link has another rate from now on."""
        end.bytes_per_s = bytes_per_s
        self._share(end)

    def _remove(self, flow: _Flow) -> None:
        del flow.up.flows[flow], flow.down.flows[flow]
        del self._flows[flow.up, flow.down]
        self._share(flow.up, flow.down)

    def _share(self, *ends: LinkEnd) -> None:
        touched: dict[_Flow, None] = {}
        front = dict.fromkeys(ends)
        for _ in range(_ROUNDS):
            following: dict[LinkEnd, None] = {}
            for end in front:
                if end.fill() or end in ends:
                    touched.update(end.flows)
                    following.update(
                        (flow.down if flow.up is end else flow.up, None) for flow in end.flows
                    )
            front = following
        now = self._clock.now
        for flow in touched:
            rate = min(flow.up.level, flow.down.level)
            if rate != flow.rate:
                flow.left -= flow.rate * (now - flow.since)
                flow.since, flow.rate = now, rate
                self._plan(flow)

    def _plan(self, flow: _Flow) -> None:
        flow.turn += 1
        turn = flow.turn
        self._clock.after(max(flow.left, 0.0) / flow.rate, lambda: self._ended(flow, turn))

    def _ended(self, flow: _Flow, turn: int) -> None:
        if turn != flow.turn:
            return
        size, done = flow.queue.popleft()
        flow.up.sent += size
        if flow.queue:
            flow.left, flow.since = flow.queue[0][0], self._clock.now
            self._plan(flow)
        else:
            self._remove(flow)
        done()
