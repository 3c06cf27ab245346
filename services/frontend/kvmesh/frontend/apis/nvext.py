"""`nvext`: the extension of request bodies with hints for the mesh (docs/requests.md)."""

from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvmesh.frontend.apis.base import decode_part
from kvmesh.frontend.apis.body_types import unknown_fields
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.namespaces import check_name
from kvmesh.retention.hints import CacheMark, EmptyRange, Retention, to_directives

EXTRA_FIELDS = (
    *("worker_id", "timing", "cache", "routing", "stop_reason", "ignored"),
    *("detailed_finish_reason", "completion_token_ids"),
)
ANNOTATIONS = ("formatted_prompt", "token_ids")
SESSION_TIMEOUT_S = 300.0  # of a session that is opened or bound without one
_EXTRA_FIELDS, _ANNOTATIONS = frozenset(EXTRA_FIELDS), frozenset(ANNOTATIONS)
_NONE: frozenset[str] = frozenset()  # each call makes a new one


MAX_INT = (1 << 31) - 1
MAX_IGNORED = 1024
NonNegative = Annotated[int, Meta(ge=0, le=MAX_INT)]
Name = Annotated[str, Meta(max_length=512)]


class AgentHints(Struct):
    """Advice: numbers out of their range are clipped."""

    priority: int | None = None
    strict_priority: int | None = None
    latency_sensitivity: float | None = None
    osl: int | None = None
    speculative_prefill: bool | None = None


class SessionControl(Struct):
    """A session that is opened or bound keeps its prompt cached for `timeout` seconds."""

    session_id: str
    action: Literal["open", "bind", "close"] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    ephemeral: bool = False

    def ttl_s(self) -> float | None:
        """The retention time of the prompt; None for a request that asks for none."""
        if self.action == "close":
            return None
        return self.timeout or (SESSION_TIMEOUT_S if self.action else None)


class AgentContext(Struct):
    """Identity of an agent's run and of one trajectory, the agent's or a subagent's, within it."""

    session_type_id: Name | None = None
    session_id: str | None = None
    trajectory_id: str | None = None
    parent_trajectory_id: str | None = None
    trajectory_final: bool = False


class RoutingConstraints(Struct):
    """`labels` that a worker must have; `allow` and `exclude` list instances.

    `required_taints` are taints that a worker must have; `preferred_taints` maps some to weights.
    """

    labels: Annotated[dict[Name, Name], Meta(max_length=256)] = {}
    required_taints: Annotated[list[Name], Meta(max_length=256)] = []
    preferred_taints: Annotated[dict[Name, float], Meta(max_length=256)] = {}
    allow: Annotated[list[Name], Meta(max_length=4096)] = []
    exclude: Annotated[list[Name], Meta(max_length=4096)] = []


class Nvext(Struct):
    agent_hints: AgentHints | None = None
    cache_control: CacheMark | None = None
    retention: Retention | None = None
    session_control: SessionControl | None = None
    agent_context: AgentContext | None = None
    cache_salt: str | None = None
    extra_fields: list[Name] | None = None
    annotations: list[str] | None = None
    token_data: list[Annotated[int, Meta(ge=0, lt=1 << 32)]] | None = None
    backend_instance_id: Name | int | None = None
    prefill_worker_id: Name | int | None = None
    decode_worker_id: Name | int | None = None
    dp_rank: NonNegative | None = None
    prefill_dp_rank: NonNegative | None = None
    max_thinking_tokens: NonNegative | None = None
    use_raw_prompt: bool | None = None
    greed_sampling: bool | None = None
    routing_constraints: RoutingConstraints | None = None
    policy: Name | None = None
    router_config_override: Annotated[dict[Name, float], Meta(max_length=256)] | None = None


def apply_nvext(request: GenerateRequest, nvext: Nvext) -> None:
    """Apply the fields of prompt, sampling, retention and policy; `request_hints` does the rest."""
    if nvext.cache_salt:
        check_name(nvext.cache_salt, "nvext.cache_salt")
        request.cache_salt = nvext.cache_salt
    if nvext.token_data:
        request.prompts = [nvext.token_data]
    elif nvext.use_raw_prompt and request.messages:
        request.prompts = [_raw(request)]
    if nvext.greed_sampling:
        request.sampling = msgspec.structs.replace(request.sampling, temperature=0.0)
    try:
        request.retention, request.decode = to_directives(nvext.retention)
    except EmptyRange as error:
        where = f"nvext.retention[{error.index}].end"
        raise InvalidRequest(f"`{where}` must be greater than `start`.", where) from error
    request.retain_prompt(nvext.cache_control.ttl_s() if nvext.cache_control else None)
    request.retain_prompt(nvext.session_control.ttl_s() if nvext.session_control else None)
    request.speculative = bool(nvext.agent_hints and nvext.agent_hints.speculative_prefill)
    request.policy = nvext.policy
    request.overrides = nvext.router_config_override or request.overrides
    if nvext.extra_fields:
        request.extra_fields = frozenset(nvext.extra_fields) & _EXTRA_FIELDS
    if nvext.max_thinking_tokens is not None:
        request.thinking_budget = nvext.max_thinking_tokens


def annotations_of(nvext: Nvext | None) -> frozenset[str]:
    """The annotations that a stream is to have."""
    if nvext is None or not nvext.annotations:
        return _NONE
    return frozenset(nvext.annotations) & _ANNOTATIONS


def _raw(request: GenerateRequest) -> str:
    """The text of the conversation without a template."""
    blocks = [block for message in request.messages for block in message.blocks]
    return "".join(getattr(block, "text", "") for block in blocks)


def ignored_fields(body: bytes, known: type[Struct], annotates: bool = False) -> list[str]:
    """Paths of the fields of the body that have no effect, those of `nvext` last.

    At most `MAX_IGNORED` of each. `annotates`: the API has annotations in its streams.
    """
    decoded = decode_part(body, "")
    extension = decoded.pop("nvext", None)
    found = sorted(islice(unknown_fields(decoded, known), MAX_IGNORED))
    if isinstance(extension, dict):
        shown = _ANNOTATIONS if annotates and decoded.get("stream") else frozenset[str]()
        unknown = [
            *unknown_fields(extension, Nvext),
            *_unknown_names(extension, "extra_fields", _EXTRA_FIELDS),
            *_unknown_names(extension, "annotations", shown),
        ]
        found += [f"nvext.{name}" for name in sorted(unknown)[:MAX_IGNORED]]
    return found


def _unknown_names(extension: dict[str, Any], field: str, known: frozenset[str]) -> list[str]:
    """Paths of the names in a list of names that have no effect."""
    return [
        f"{field}[{index}]"
        for index, name in enumerate(extension.get(field) or ())
        if name not in known
    ]
