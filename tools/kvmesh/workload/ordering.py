"""Orders in which nothing precedes what it needs: of requests (Kahn 1962), and of sessions."""

import heapq
from collections.abc import Callable, Container, Iterator, Mapping


def topological_order(before: list[set[int]], on_cycle: Callable[[int], None]) -> Iterator[int]:
    """Yield each index after all in `before[index]`, otherwise in ascending order.

    On a cycle, call `on_cycle` with the lowest remaining index, yield that index next and remove
    its remaining predecessors from `before`.
    """
    followers: dict[int, list[int]] = {}
    for index, predecessors in enumerate(before):
        for other in predecessors:
            followers.setdefault(other, []).append(index)
    remaining = [len(predecessors) for predecessors in before]
    ready = [index for index, count in enumerate(remaining) if not count]
    done = bytearray(len(before))
    next_open = 0
    while True:
        while ready:
            index = heapq.heappop(ready)
            if done[index]:
                continue
            done[index] = True
            yield index
            for follower in followers.get(index, ()):
                remaining[follower] -= 1
                if not remaining[follower]:
                    heapq.heappush(ready, follower)
        next_open = done.find(0, next_open)
        if next_open < 0:
            return
        on_cycle(next_open)
        before[next_open] = {other for other in before[next_open] if done[other]}
        ready.append(next_open)


def ancestors(
    name: str | None, parents: Mapping[str, str | None], known: Container[str]
) -> list[str]:
    """A session `name` and those above it in `parents` that are not known, the highest first.

    A cycle is cut above the session that leads back to another one.
    """
    path: dict[str, None] = {}
    while name is not None and name in parents and name not in known and name not in path:
        path[name] = None
        name = parents[name]
    return list(path)[::-1]
