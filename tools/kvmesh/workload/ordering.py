"""An order in which everything comes after what it waits for (Kahn 1962)."""

import heapq
from collections.abc import Callable, Iterator


def in_order(before: list[set[int]], on_cycle: Callable[[int], None]) -> Iterator[int]:
    """Yield each place after all in `before[place]`, otherwise in their own order.

    Where places wait for each other in a cycle, `on_cycle` is told the first of them that is left;
    it comes next, and its remaining predecessors are removed from `before`.
    """
    followers: dict[int, list[int]] = {}
    for place, waits in enumerate(before):
        for other in waits:
            followers.setdefault(other, []).append(place)
    open_ = [len(waits) for waits in before]
    ready = [place for place, count in enumerate(open_) if not count]
    done = bytearray(len(before))
    first_left = 0
    while True:
        while ready:
            place = heapq.heappop(ready)
            if done[place]:
                continue
            done[place] = True
            yield place
            for follower in followers.get(place, ()):
                open_[follower] -= 1
                if not open_[follower]:
                    heapq.heappush(ready, follower)
        first_left = done.find(0, first_left)
        if first_left < 0:
            return
        on_cycle(first_left)
        before[first_left] = {other for other in before[first_left] if done[other]}
        ready.append(first_left)
