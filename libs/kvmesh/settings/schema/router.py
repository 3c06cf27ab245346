"""Settings of the router and of its built-in policies."""

from typing import Annotated, Literal

from msgspec import Meta, field

from kvmesh.settings.schema.common import LIVE, Amount, Count, Port, Seconds, Section, Weight

Credits = Annotated[list[float], Meta(min_length=4, max_length=4)]


class RouterSettings(Section, frozen=True, kw_only=True):
    """
    policy: routing policy: a built-in one, or module:Class
    name: stable name; empty derives one
    overlap_credits: value of an overlapping block, per tier
    prefill_weight: cost of one block to prefill; none: by its effect on others
    temperature: 0 chooses the cheapest rank; above 0 samples by softmax
    kv_events: query the index; if off, assume prompts stay where they were placed
    busy_blocks: active blocks at which a rank gets no more requests
    busy_blocks_share: the same as a share of the rank's blocks
    busy_prefill_tokens: prefill tokens at which a rank gets no more requests
    queue_threshold: requests are queued while every rank has more than this many engine steps of
        prefill; 0: never
    queue_order: order of waiting requests of one tier
    queue_limit: most waiting requests; further ones are refused
    fair_weights: quanta per turn of a class or tenant, as NAME=WEIGHT
    batch_classes: classes (of keys, or x-kvmesh-fair-class) whose requests are batch work: they run
        only in room that no other request needs
    disagg_tokens: uncached tokens from which a prefill worker computes the prompt
    admit_agents: kv: have some agents rest while contexts exceed the memory
    forecast_returns: learn when prompts return, and tell the kvbms what to expect
    load_adapters: have workers with weights.share load the adapters of requests
    metrics_port: port of /metrics and /health; 0: none

    Tuning:
    request_weight: cost of an active request, in blocks
    credit_decay: rate at which credits decay on ranks with more waiting prefill than others
    seed: seed for ties and sampling; none: random
    index_timeout_s: longest wait for the index before routing without it
    sequence_ttl_s: an active sequence without an event for this long is dropped
    predicted_ttl_s: a placed prompt counts as cached until this long after its first token, when
        its KV events must have arrived; 0: never
    approximate_ttl_s: the same if kv_events is off
    await_prefixes: a request waits while its rank computes a long prefix of it for another one, at
        most for the time in which another rank would compute it
    gather_s: requests that arrive within this time are placed together, and the router holds them
        until their rank is nearly free; 0: neither
    queue_quantum: uncached tokens of a fair class per turn
    batch_blocks_share: share of a rank's blocks up to which batch requests start beside others
    batch_timeout_s: longest wait of a batch request for a placement
    priority_shift_s: arrival time of a request of priority p moves back by p times this
    latency_shift_s: arrival time of a fully latency-sensitive request moves back by this
    starvation_s: a request that waited this long goes first
    rescore_s: overlaps of a waiting request are queried again after this
    load_beta: load-aware: weight of relative load against the cached share
    session_mode: session: always stay, or only while it pays
    session_ttl_s: session: an idle binding expires
    session_spill: session, soft: move to a rank cheaper by this share of the prompt
    disagg_backlog: a prefill rank with more steps of prefill than this is not used
    prefill_credits: overlap_credits when prefilling
    decode_credits: overlap_credits when only decoding
    learn_speeds: learn the ranks' speeds, and place by them
    adapter_wait_s: longest wait of a request until its adapter is loaded
    adapter_idle_s: an adapter that is not pinned makes room after so long without use
    """

    policy: str = "kv"
    name: str = ""
    overlap_credits: Annotated[Credits, LIVE] = field(
        default_factory=lambda: [1.0, 0.75, 0.25, 0.25]
    )
    prefill_weight: Annotated[Weight | None, LIVE] = None
    request_weight: Annotated[Weight, LIVE] = 0.0
    credit_decay: Annotated[Weight, LIVE] = 0.0
    temperature: Annotated[Weight, LIVE] = 0.0
    seed: int | None = None
    index_timeout_s: Seconds = 0.25
    sequence_ttl_s: Seconds = 300.0
    kv_events: bool = True
    predicted_ttl_s: Weight = 1.0
    approximate_ttl_s: Seconds = 120.0
    await_prefixes: Annotated[bool, LIVE] = True
    busy_blocks: Annotated[Count | None, LIVE] = None
    busy_blocks_share: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, LIVE] = None
    busy_prefill_tokens: Annotated[Count | None, LIVE] = None
    queue_threshold: Weight = 2.0
    gather_s: Weight = 0.001
    queue_order: Annotated[Literal["fcfs", "wspt", "lcfs"], LIVE] = "fcfs"
    queue_limit: Annotated[Count, LIVE] = 4096
    queue_quantum: Count = 8192
    fair_weights: list[str] = []
    batch_classes: list[str] = []
    batch_blocks_share: Annotated[float, Meta(gt=0, le=1)] = 0.001
    batch_timeout_s: Seconds = 3600.0
    priority_shift_s: Annotated[Weight, LIVE] = 1.0
    latency_shift_s: Annotated[Weight, LIVE] = 10.0
    starvation_s: Seconds = 30.0
    rescore_s: Annotated[Seconds, LIVE] = 5.0
    load_beta: Weight = 1.0
    session_mode: Literal["hard", "soft"] = "soft"
    session_ttl_s: Seconds = 300.0
    session_spill: Weight = 0.5
    disagg_tokens: Annotated[Amount, LIVE] = 2048
    disagg_backlog: Annotated[Weight, LIVE] = 4.0
    prefill_credits: Annotated[Credits, LIVE] = field(
        default_factory=lambda: [1.0, 0.75, 0.25, 0.25]
    )
    decode_credits: Annotated[Credits, LIVE] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    learn_speeds: bool = True
    admit_agents: bool = True
    forecast_returns: bool = True
    load_adapters: bool = True
    adapter_wait_s: Annotated[Seconds, LIVE] = 30.0
    adapter_idle_s: Annotated[Seconds, LIVE] = 60.0
    metrics_port: Port = 0
