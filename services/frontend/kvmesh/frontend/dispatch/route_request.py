"""The routers' query for a placement of a prompt."""

from collections.abc import Sequence

from msgspec.structs import replace

from kvmesh.bus.messages import PrefetchTerms, RouteRequest
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.preprocess.preprocessor import PromptTokens

MIN_DEADLINE_S = 0.001  # a router, not the frontend, refuses a request whose deadline has passed


def route_request(
    request: GenerateRequest,
    prompt: PromptTokens,
    *,
    attempt: str,
    model: str,
    adapter: str | None,
    max_tokens: int,
    deadline_s: float,
    exclude: Sequence[str] = (),
    explain: bool = False,
    arrived: float | None = None,
    prefetch: PrefetchTerms | None = None,
    traceparent: str = "",
) -> RouteRequest:
    """Query for `prompt` under the id `attempt`, with the hints and constraints of `request`.

    `exclude` adds instances to those that `request` excludes. `arrived` is the Unix time that
    orders a request that has been in a queue before.
    """
    placement = request.placement
    if exclude:
        placement = replace(placement, exclude=[*placement.exclude, *exclude])
    return RouteRequest(
        request=attempt,
        model=model,
        sequence_hashes=prompt.sequence_hashes,
        tokens=prompt.count,
        max_tokens=max_tokens,
        deadline_s=max(deadline_s, MIN_DEADLINE_S),
        adapter=adapter,
        hints=request.hints,
        placement=placement,
        policy=request.policy,
        overrides=request.overrides,
        explain=explain,
        salt=prompt.salt,
        arrived=arrived,
        prefetch=prefetch,
        traceparent=traceparent,
    )
