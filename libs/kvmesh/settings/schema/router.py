"""Settings of the router and of its built-in policies."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from kvmesh.settings.schema.common import (
    LIVE,
    Count,
    Port,
    Seconds,
    Section,
    Weight,
)


class RouterSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "request_weight credit_decay seed index_timeout_s sequence_ttl_s predicted_ttl_s "
        "approximate_ttl_s await_prefixes gather_s queue_quantum batch_blocks_share "
        "batch_timeout_s priority_shift_s latency_shift_s starvation_s rescore_s load_beta "
        "session_mode session_ttl_s session_spill disagg_backlog prefill_credits "
        "decode_credits learn_speeds adapter_idle_s adapter_wait_s"
    )
    policy: Annotated[str, Meta(description="routing policy: a built-in one, or module:Class")] = (
        "kv"
    )
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    overlap_credits: Annotated[
        list[float],
        Meta(
            min_length=4,
            max_length=4,
            extra=LIVE,
            description="value of an overlapping block, per tier",
        ),
    ] = field(default_factory=lambda: [1.0, 0.75, 0.25, 0.25])
    prefill_weight: Annotated[
        Weight | None,
        Meta(extra=LIVE, description="cost of one block to prefill; none: by its effect on others"),
    ] = None
    request_weight: Annotated[
        Weight, Meta(extra=LIVE, description="cost of an active request, in blocks")
    ] = 0.0
    credit_decay: Annotated[
        Weight,
        Meta(
            extra=LIVE,
            description="rate at which credits decay on ranks with more waiting prefill than"
            " others",
        ),
    ] = 0.0
    temperature: Annotated[
        Weight,
        Meta(extra=LIVE, description="0 chooses the cheapest rank; above 0 samples by softmax"),
    ] = 0.0
    seed: Annotated[int | None, Meta(description="seed for ties and sampling; none: random")] = None
    index_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for the index before routing without it")
    ] = 0.25
    sequence_ttl_s: Annotated[
        Seconds, Meta(description="an active sequence without an event for this long is dropped")
    ] = 300.0
    kv_events: Annotated[
        bool,
        Meta(description="query the index; if off, assume prompts stay where they were placed"),
    ] = True
    predicted_ttl_s: Annotated[
        Weight,
        Meta(
            description="a placed prompt counts as cached until this long after its first token, "
            "when its KV events must have arrived; 0: never"
        ),
    ] = 1.0
    approximate_ttl_s: Annotated[Seconds, Meta(description="the same if kv_events is off")] = 120.0
    await_prefixes: Annotated[
        bool,
        Meta(
            extra=LIVE,
            description="a request waits while its rank computes a long prefix of it for another"
            " one, at most for the time in which another rank would compute it",
        ),
    ] = True
    busy_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(extra=LIVE, description="active blocks at which a rank gets no more requests"),
    ] = None
    busy_blocks_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(extra=LIVE, description="the same as a share of the rank's blocks"),
    ] = None
    busy_prefill_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(extra=LIVE, description="prefill tokens at which a rank gets no more requests"),
    ] = None
    queue_threshold: Annotated[
        Weight,
        Meta(
            description="requests are queued while every rank has more than this many engine steps "
            "of prefill; 0: never"
        ),
    ] = 2.0
    gather_s: Annotated[
        Weight,
        Meta(
            description="requests that arrive within this time are placed together, and the router "
            "holds them until their rank is nearly free; 0: neither"
        ),
    ] = 0.001
    queue_order: Annotated[
        Literal["fcfs", "wspt", "lcfs"],
        Meta(extra=LIVE, description="order of waiting requests of one tier"),
    ] = "fcfs"
    queue_limit: Annotated[
        Count, Meta(extra=LIVE, description="most waiting requests; further ones are refused")
    ] = 4096
    queue_quantum: Annotated[
        Count, Meta(description="uncached tokens of a fair class per turn")
    ] = 8192
    fair_weights: Annotated[
        list[str], Meta(description="quanta per turn of a class or tenant, as NAME=WEIGHT")
    ] = []
    batch_classes: Annotated[
        list[str],
        Meta(
            description="classes (of keys, or x-kvmesh-fair-class) whose requests are batch work:"
            " they run only in room that no other request needs"
        ),
    ] = []
    batch_blocks_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of a rank's blocks up to which batch requests start beside others",
        ),
    ] = 0.001
    batch_timeout_s: Annotated[
        Seconds, Meta(description="longest wait of a batch request for a placement")
    ] = 3600.0
    priority_shift_s: Annotated[
        Weight,
        Meta(
            extra=LIVE,
            description="arrival time of a request of priority p moves back by p times this",
        ),
    ] = 1.0
    latency_shift_s: Annotated[
        Weight,
        Meta(
            extra=LIVE,
            description="arrival time of a fully latency-sensitive request moves back by this",
        ),
    ] = 10.0
    starvation_s: Annotated[
        Seconds, Meta(description="a request that waited this long goes first")
    ] = 30.0
    rescore_s: Annotated[
        Seconds,
        Meta(extra=LIVE, description="overlaps of a waiting request are queried again after this"),
    ] = 5.0
    load_beta: Annotated[
        Weight, Meta(description="load-aware: weight of relative load against the cached share")
    ] = 1.0
    session_mode: Annotated[
        Literal["hard", "soft"], Meta(description="session: always stay, or only while it pays")
    ] = "soft"
    session_ttl_s: Annotated[Seconds, Meta(description="session: an idle binding expires")] = 300.0
    session_spill: Annotated[
        Weight,
        Meta(description="session, soft: move to a rank cheaper by this share of the prompt"),
    ] = 0.5
    disagg_tokens: Annotated[
        int,
        Meta(
            ge=0,
            extra=LIVE,
            description="uncached tokens from which a prefill worker computes the prompt",
        ),
    ] = 2048
    disagg_backlog: Annotated[
        Weight,
        Meta(
            extra=LIVE,
            description="a prefill rank with more steps of prefill than this is not used",
        ),
    ] = 4.0
    prefill_credits: Annotated[
        list[float],
        Meta(min_length=4, max_length=4, extra=LIVE, description="overlap_credits when prefilling"),
    ] = field(default_factory=lambda: [1.0, 0.75, 0.25, 0.25])
    decode_credits: Annotated[
        list[float],
        Meta(
            min_length=4, max_length=4, extra=LIVE, description="overlap_credits when only decoding"
        ),
    ] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    learn_speeds: Annotated[
        bool, Meta(description="learn the ranks' speeds, and place by them")
    ] = True
    admit_agents: Annotated[
        bool,
        Meta(description="kv: have some agents rest while contexts exceed the memory"),
    ] = True
    forecast_returns: Annotated[
        bool, Meta(description="learn when prompts return, and tell the workers what to expect")
    ] = True
    load_adapters: Annotated[
        bool,
        Meta(description="have workers with weights.share load the adapters of requests"),
    ] = True
    adapter_wait_s: Annotated[
        Seconds,
        Meta(extra=LIVE, description="longest wait of a request until its adapter is loaded"),
    ] = 30.0
    adapter_idle_s: Annotated[
        Seconds,
        Meta(
            extra=LIVE,
            description="an adapter that is not pinned makes room after so long without use",
        ),
    ] = 60.0
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
