"""The account of a prompt's tokens in words: what was reused, lost and why, and new. Pure."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from kvmesh.bus.messages import CacheAccount, CacheLoss, PromptChange

TIERS = ("engine memory", "host memory", "disk", "remote store")
REASONS = {
    "evicted": "evicted as the least recently used",
    "unlikely": "evicted, as their return was worth less than that of the other blocks",
    "expired": "evicted after their retention had expired",
    "clipped": "evicted, as the tenant's budget did not cover their retention",
    "released": "dropped with their session",
    "superseded": "given up, as the session had changed its prompt",
    "cleared": "cleared on command",
    "corrupt": "dropped, as their content was wrong or unreadable",
    "worker_gone": "lost with their worker",
    "elsewhere:load": "held by another worker, which cost more",
    "elsewhere:room": "held by another worker, which lacked free blocks",
    "elsewhere:busy": "held by another worker, which was past its busy threshold",
    "elsewhere:role": "held by another worker, whose role is not to compute such prompts",
    "elsewhere:constraints": "held by another worker, which the request's constraints excluded",
    "elsewhere:excluded": "held by another worker, which had refused or lost the request",
    "elsewhere:draining": "held by another worker, which was draining",
    "elsewhere:gone": "held by another worker, which had left",
    "unfinished": "still being computed by another request",
    "not_found": "announced, but not found by the engine",
    "never_announced": "computed before, but never announced to the index",
    "forgotten": "computed before; the index does not remember their removal",
    "other_namespace": "computed before in another namespace (model, adapter or tenant)",
    "diverged": "after a change of the prompt",
    "thinking_not_returned": "after thinking that the client did not return",
    "call_rewritten": "after a tool call that the client returned with other arguments",
    "rerendered": "after text that the chat template writes in another form",
    "unknown": "computed before; the index did not reply",
}

_OF_A_CHANGE = ("thinking_not_returned", "call_rewritten", "rerendered")
_OWN_REASON = ("not_returned", "rewritten", "rerendered")  # ways of changes that say it, too

Named = Callable[[str], str]


def account_lines(
    account: CacheAccount, tiers: list[int], name: Named = str, first: str | None = None
) -> Iterator[str]:
    """Lines about an account; `name` adds to a request's id what is known of it.

    `first` is the first request that had the last block of those shared with other requests.
    """
    yield f"reused {account.reused:,} of {account.prompt_tokens:,} prompt tokens{_tiers(tiers)}"
    own = f" of its own session (last {account.previous})" if account.previous else ""
    shared = f" (first {first})" if first is not None else ""
    parts = [
        (account.own, f"{account.own:,}{own}"),
        (account.ahead, f"{account.ahead:,} computed ahead for it"),
        (account.shared, f"{account.shared:,} of other requests{shared}"),
    ]
    if account.reused:
        yield "  " + ", ".join(text for count, text in parts if count)
    if account.losses:
        yield f"lost {account.lost:,} tokens, which were computed again:"
    for loss in account.losses:
        yield f"  {loss.tokens:,} from token {loss.first:,} on: {_loss(loss, name)}"
    if account.change is not None:
        yield change_line(account.change)
    yield f"new {account.new:,}; an endless cache would have had {account.possible:,}"


def change_line(change: PromptChange) -> str:
    """The position and the way of a change, and for how many turns it has come again."""
    again = f", for the {_ordinal(change.turns)} turn in a row" if change.turns > 1 else ""
    at = f" at character {change.offset:,}" if change.way == "changed" else ""
    return (
        f"the prompt differs from the session's last one at token {change.token:,}:"
        f" {change_text(change)}{at}{again}"
    )


def change_text(change: PromptChange) -> str:
    """The part of the prompt that has changed, and the way."""
    if change.way == "not_returned":
        return f"the client did not return the thinking of the last answer (message {change.index})"
    if change.way == "rewritten":
        return f"the client returned tool call {change.name} with other arguments"
    if change.way == "rerendered" and change.part == "thinking":
        return f"the chat template left out the {part(change)}"
    if change.way == "rerendered":
        return f"the chat template wrote {part(change)} in another form"
    return f"{part(change)} {change.way}"


def part(change: PromptChange) -> str:
    """The part of the prompt that has changed."""
    names = {
        "system": "system prompt",
        "tool": f"tool {change.index} ({change.name})",
        "message": f"message {change.index} ({change.name})",
        "thinking": f"thinking of message {change.index}",
        "call": f"tool call in message {change.index} ({change.name})",
    }
    return names.get(change.part, "text")


def reason_text(reason: str) -> str:
    """The reason of a loss, in words; an unknown one as it is."""
    return REASONS.get(reason, reason)


def lost_for(account: CacheAccount | None) -> str:
    """The reasons of the losses, the largest first, with the part of the prompt that changed."""
    if account is None:
        return ""
    lost = {loss.reason: 0 for loss in account.losses}
    for loss in account.losses:
        lost[loss.reason] += loss.tokens
    change = account.change
    told = _OF_A_CHANGE if change is not None and change.way in _OWN_REASON else ()
    ordered = (reason for reason, _ in sorted(lost.items(), key=lambda i: -i[1]))
    reasons = [reason_text(reason) for reason in ordered if reason not in told]
    if change is not None:
        reasons.append(change_text(change))
    return "; ".join(reasons)


def _loss(loss: CacheLoss, name: Named) -> str:
    text = reason_text(loss.reason)
    if loss.worker is not None:
        tier = f", {TIERS[loss.tier]}" if loss.tier is not None and loss.tier < len(TIERS) else ""
        text += f" ({loss.worker}{tier}{_at(loss.time)})"
    if loss.request is not None:
        cause = "at the prompt of" if loss.reason == "superseded" else "for blocks of"
        text += f", {cause} {name(loss.request)}"
    return text


def _at(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return f", {datetime.fromtimestamp(seconds, UTC).astimezone():%H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # of a worker whose clock is far off
        return ""


def _tiers(tokens: list[int]) -> str:
    """The tiers of the reused tokens, unless all are in the engine's own memory."""
    if not any(tokens[1:]):
        return ""
    parts = (f"{n:,} from {where}" for where, n in zip(TIERS, tokens, strict=False) if n)
    return f" ({', '.join(parts)})"


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if 10 < number % 100 < 14 else ends.get(number % 10, 'th')}"
