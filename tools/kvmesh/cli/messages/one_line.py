"""One-line summaries of messages."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvmesh.bus import messages as m
from kvmesh.cli.messages.decoding import Undecodable, hashes, hexadecimal, plain
from kvmesh.frontend.namespaces import own_name
from kvmesh.hashing import HASH_BYTES, TOKEN_BYTES

SHOWN = 4
WIDTH = 160


def summarise(message: object) -> str:
    """The essential fields of a message; hashes shortened, lists counted."""
    formatter = _FORMATTERS.get(type(message))
    if formatter is not None:
        return formatter(message)
    text = msgspec.json.encode(plain(message)).decode()
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}…"


def _some(parts: Sequence[str]) -> str:
    more = len(parts) - SHOWN
    return ", ".join(parts[:SHOWN]) + (f", and {more} more" if more > 0 else "")


def _hash(value: int) -> str:
    return hexadecimal(value)[:8]


def _span(packed: bytes) -> str:
    values = hashes(packed)
    if not values:
        return ""
    ends = [values[0]] if len(values) == 1 else [values[0], values[-1]]
    return f" [{'…'.join(map(_hash, ends))}]"


def _tier(tier: int) -> str:
    return f"G{tier + 1}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f} ms"


def _kv_batch(batch: m.KvBatch) -> str:
    more = f"…{batch.first + len(batch.events) - 1}" if len(batch.events) > 1 else ""
    events = _some([_kv_event(event) for event in batch.events])
    return f"{batch.instance}#{batch.rank} {batch.first}{more}  {events}"


def _kv_event(event: m.KvEvent) -> str:
    if isinstance(event, m.Cleared):
        return f"cleared {'everything' if event.tier is None else _tier(event.tier)}"
    count = len(event.engine) // HASH_BYTES
    if isinstance(event, m.Removed):
        return f"-{count} {_tier(event.tier)}{_span(event.engine)}"
    parent = "root" if event.parent is None else _hash(event.parent)
    return f"+{count} {_tier(event.tier)} {parent} →{_span(event.engine)}"


def _decision(decision: m.Decision) -> str:
    chosen = decision.chosen
    overlap = "/".join(map(str, chosen.overlap))
    parts = [
        f"{decision.request} → {chosen.worker}#{chosen.rank}",
        f"{decision.policy}: cost {chosen.cost:.1f}",
        f"overlap {overlap} of {len(decision.sequence_hashes) // HASH_BYTES} blocks",
        f"{len(decision.candidates)} candidates",
        f"waited {_milliseconds(decision.wait_s)}, index {_milliseconds(decision.index_s)}",
    ]
    if decision.attempt:
        parts.append(f"attempt {decision.attempt + 1}")
    return "  ".join([*parts, *filter(None, [decision.note])])


def _outcome(outcome: m.Outcome) -> str:
    return (
        f"{outcome.request} ✓ {outcome.finish} on {outcome.instance}"
        f"  {outcome.cached_tokens} cached, {outcome.output_tokens} out"
        f"  first token {_milliseconds(outcome.ttft_s)}, total {_milliseconds(outcome.total_s)}"
    )


def _seq_batch(batch: m.SeqBatch) -> str:
    return f"{batch.source}: {_some([_seq_event(event) for event in batch.events])}"


def _seq_event(event: m.SeqEvent) -> str:
    if isinstance(event, m.SeqAdd):
        overlap = f"overlap {event.overlap} of {len(event.sequence_hashes) // HASH_BYTES} blocks"
        if event.waits_for:
            return f"wait {event.request} for {event.waits_for} on {event.instance} ({overlap})"
        return f"add {event.request} on {event.instance} ({overlap})"
    if isinstance(event, m.SeqProgress):
        return f"progress {event.request} {event.generated} tokens"
    if isinstance(event, m.SeqWait):
        return f"wait {event.request} in {event.router} ({event.cost} tokens to prefill)"
    return f"{'free' if isinstance(event, m.SeqFree) else 'prefilled'} {event.request}"


def _step(step: m.StepOutput) -> str:
    tokens = sum(len(chunk.tokens) for chunk in step.chunks)
    ends = [f"{chunk.request} {chunk.finish}" for chunk in step.chunks if chunk.finish]
    text = f"{step.instance}: {tokens} tokens of {len(step.chunks)} requests"
    return f"{text}  finished {_some(ends)}" if ends else text


def _work(work: m.Work) -> str:
    prompt = len(work.tokens) // TOKEN_BYTES
    text = (
        f"{work.request} from {work.frontend}  prompt {prompt}, at most {work.sampling.max_tokens}"
    )
    return f"{text}, {work.generated} generated before" if work.generated else text


def _control(
    command: m.Control | m.CheckIndex | m.ShowLearned | m.ShowReturns | m.ShowSpeeds,
) -> str:
    fields = [str(getattr(command, name)) for name in command.__struct_fields__]
    return " ".join([type(command).__name__.lower(), *fields])


def _load(load: m.Load) -> str:
    return (
        f"#{load.rank}  {load.running} running, {load.waiting} waiting"
        f"  blocks {load.active_blocks} active, {load.cached_blocks} cached of {load.total_blocks}"
        f"  {load.prefill_tokens} tokens to prefill"
    )


def _starting(starting: m.Starting) -> str:
    before = ", ".join(f"{phase.name} {phase.seconds:.1f} s" for phase in starting.phases)
    return (
        f"{starting.instance}  starts {starting.model} on {starting.engine}: {starting.phase}"
        f"{f' after {before}' if before else ''}"
    )


def _wake(wake: m.Wake) -> str:
    return (
        f"{wake.waiting} waiting in {wake.frontend}, {wake.tokens} tokens to prefill"
        f"  first {wake.request}"
    )


def _tool(event: m.ToolEvent) -> str:
    parts = [f"{own_name(event.session)} {event.tool or 'a tool'} {event.event}"]
    if event.call:
        parts.append(event.call)
    if event.remaining_s is not None:
        parts.append(f"{event.remaining_s:g} s remain")
    return "  ".join(parts)


def _scaling(decision: m.ScalingDecision) -> str:
    pools = _some([f"{name} {p.ready}→{p.wanted}" for name, p in decision.pools.items()])
    signals = decision.signals
    rates = [f"{signals.get(f'{name}_per_s', 0.0):.2f}" for name in ("arrivals", "forecast")]
    parts = [
        f"{decision.model} {pools}",
        f"arrivals {rates[0]}/s, forecast {rates[1]}/s",
        f"{signals.get('waiting_requests', 0.0):.0f} waiting",
        decision.reason,
    ]
    return "  ".join(parts)


def _query(query: m.OverlapQuery) -> str:
    blocks = sum(len(prompt) // HASH_BYTES for prompt in query.prompts)
    return f"{len(query.prompts)} prompts, {blocks} blocks"


def _route_request(request: m.RouteRequest) -> str:
    return f"{request.request}  prompt {request.tokens}, at most {request.max_tokens}"


def _instance(card: m.Instance) -> str:
    state = "draining" if card.draining else "up"
    model = f"  {card.model.name}" if card.model else ""
    return f"{card.instance} {state}  {card.role} {card.name} {card.version}{model}"


def _undecodable(message: Undecodable) -> str:
    return f"undecodable, {message.size} bytes: {message.error}"


def _offer(offer: m.Offer) -> str:
    count = offer.shared + len(offer.sequence_hashes) // HASH_BYTES
    new = offer.sequence_hashes[HASH_BYTES * max(0, offer.first - offer.shared) :]
    request = f" of {offer.request}" if offer.request else ""
    return f"offer blocks {offer.first} to {count}{request}{_span(new)}"


def _fetch(fetch: m.Fetch) -> str:
    count = fetch.shared + len(fetch.sequence_hashes) // HASH_BYTES
    waits = f", waits {fetch.wait_s:g} s" if fetch.wait_s else ""
    span = _span(fetch.sequence_hashes)
    return f"fetch {fetch.request} {count} blocks, {fetch.held} held{span}{waits}"


def _lend(lend: m.Lend) -> str:
    return f"lend {len(lend.digests) // 16} blocks of {lend.block_bytes} bytes"


def _prepare(prepare: m.Prepare) -> str:
    return f"prepare {len(prepare.digests) // 16} blocks of {prepare.model}"


def _computing(computing: m.ClaimAnnouncement) -> str:
    count = len(computing.digests) // 16
    state = f"computes a prompt of {count} digests" if count else "ended its computation"
    return f"{computing.instance} #{computing.number} {state}"


def _put_image(image: m.PutImage) -> str:
    return f"put_image {image.digest.hex()[:12]} of {len(image.data)} bytes"


_FORMATTERS: dict[type, Callable[[Any], str]] = {
    m.KvBatch: _kv_batch,
    m.Decision: _decision,
    m.Outcome: _outcome,
    m.SeqBatch: _seq_batch,
    m.StepOutput: _step,
    m.Work: _work,
    m.Load: _load,
    m.Starting: _starting,
    m.Wake: _wake,
    m.ToolEvent: _tool,
    m.ScalingDecision: _scaling,
    m.OverlapQuery: _query,
    m.RouteRequest: _route_request,
    m.Instance: _instance,
    m.Offer: _offer,
    m.Fetch: _fetch,
    m.Lend: _lend,
    m.Prepare: _prepare,
    m.ClaimAnnouncement: _computing,
    m.PutImage: _put_image,
    Undecodable: _undecodable,
    **dict.fromkeys(
        (
            *(m.Cancel, m.Resend, m.Dump, m.Drain, m.Clear, m.Ping),
            *(m.LoadAdapter, m.TakeAdapter, m.UnloadAdapter, m.Serve),
            *(m.Promote, m.Sleep, m.ShowEvents, m.MeasureImage),
            *(m.CheckIndex, m.ShowLearned, m.ShowReturns, m.ShowSpeeds),
        ),
        _control,
    ),
}
