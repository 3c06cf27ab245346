"""The parts of a request's way through the mesh: the process, and the time in it. Pure."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.observer.prefetch_uses import prompt_rank
from kvmesh.observer.request_time import split_time


class RequestPart(NamedTuple):
    """One part of a request's time, in seconds, and where it passed. None: it is not known."""

    name: str
    process: str
    seconds: float | None


def request_parts(seen: SeenRequest, now: float, frontend: str) -> list[RequestPart]:
    """The parts in their order; of a request that runs those so far, at the Unix time `now`.

    `frontend` names the frontend, which no event does.
    """
    return list(_ended(seen, frontend) if seen.outcome is not None else _running(seen, now))


def _ended(seen: SeenRequest, frontend: str) -> Iterator[RequestPart]:
    assert seen.outcome is not None
    time = split_time(seen.outcome)
    router, first = _router(seen), _prompt_workers(seen)
    yield RequestPart("prepare", frontend, time.prepare_s)
    yield RequestPart("router's queue", router, time.queue_s)
    yield RequestPart("index", "indexer", time.index_s)
    yield RequestPart("route", router, time.route_s)
    yield RequestPart("engine's queue", first, time.engine_wait_s)
    yield RequestPart("prefill", first, time.prefill_s)
    decode = _names(decision.chosen.instance for decision in seen.decisions)
    yield RequestPart("decode", decode or seen.instance, time.decode_s)


def _running(seen: SeenRequest, now: float) -> Iterator[RequestPart]:
    decision = seen.decision
    if decision is None:
        yield RequestPart("router's queue", "router", max(now - seen.arrived, 0.0))
        return
    yield RequestPart("router's queue", decision.router, decision.wait_s)
    yield RequestPart("index", "indexer", decision.index_s)
    process = seen.instance if seen.state == "decode" else prompt_rank(decision).instance
    # the time of the first token is known at the end
    yield RequestPart("prefill", process, max(now - decision.time, 0.0))


def _router(seen: SeenRequest) -> str:
    return seen.decision.router if seen.decision is not None else "router"


def _prompt_workers(seen: SeenRequest) -> str:
    """The workers that computed the prompt, those of all attempts."""
    return _names(prompt_rank(each).instance for each in seen.decisions) or seen.instance


def _names(instances: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(instances))
