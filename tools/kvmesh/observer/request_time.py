"""The parts of a request's time, from its outcome. Pure."""

from msgspec import Struct

from kvmesh.bus.messages import Outcome
from kvmesh.frontend.namespaces import own_name


class RequestTime(Struct, frozen=True, kw_only=True):
    """One request's first choice: the parts of its time, in seconds, which add up to `total_s`.

    `prepare_s` in the frontend before the first query of a router; `queue_s` in routers' queues,
    `index_s` for the index, `route_s` in the rest of those queries; `engine_wait_s` in the engine's
    queue, None if the engine does not report it, then `prefill_s` includes it; `prefill_s` up to
    the first token, transfers of KV and lost attempts included; `decode_s` from there.
    """

    request: str
    time: float
    total_s: float
    ttft_s: float | None
    prepare_s: float
    queue_s: float
    index_s: float
    route_s: float
    engine_wait_s: float | None
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    finish: str
    instance: str
    session: str


def split_time(outcome: Outcome) -> RequestTime:
    """The parts of a request's time.

    After a migration, queries of routers that follow the first token count where they belong, and
    not in the decode time as well.
    """
    first = outcome.total_s if outcome.ttft_s is None else outcome.ttft_s
    before = outcome.prepare_s + outcome.route_s
    wait = min(outcome.engine_wait_s or 0.0, max(first - before, 0.0))
    prefill = max(first - before - wait, 0.0)
    return RequestTime(
        request=outcome.request,
        time=outcome.time,
        total_s=outcome.total_s,
        ttft_s=outcome.ttft_s,
        prepare_s=outcome.prepare_s,
        queue_s=outcome.wait_s,
        index_s=outcome.index_s,
        route_s=outcome.route_s - outcome.wait_s - outcome.index_s,
        engine_wait_s=None if outcome.engine_wait_s is None else wait,
        prefill_s=prefill,
        decode_s=max(outcome.total_s - before - wait - prefill, 0.0),
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        attempts=outcome.attempts,
        finish=outcome.finish,
        instance=outcome.instance,
        session=own_name(outcome.session),
    )
