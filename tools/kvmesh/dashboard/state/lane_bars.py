"""The turns of sessions as bars over time, with the waits between them. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvmesh.bus.messages import CacheAccount
from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.observer.cache_text import change_line, reason_text
from kvmesh.observer.decision_text import clock_text, time_text
from kvmesh.runtime.logs import printable

MOST_BARS = 1200  # on a page; of more, each lane shows its last ones
NOTABLE = 0.1  # share of a prompt whose loss is marked: smaller ones are part of most turns
MOST_TEXT = 2000
SHARES = 5  # classes of the share cached
UNKNOWN, RUNNING = -1, -2


class TurnBar(NamedTuple):
    """One turn in the lane with this number; times in Unix seconds.

    `shade` is the class of its share cached, from 0 to SHARES - 1, or UNKNOWN or RUNNING.
    """

    lane: int
    start: float
    end: float
    shade: int
    lost: bool
    request: str


class TurnGap(NamedTuple):
    """The time between two turns, in which the agent ran its tools."""

    lane: int
    start: float
    end: float


def lane_bars(
    lanes: Sequence[Sequence[SeenRequest]], since: float, now: float
) -> tuple[list[TurnBar], list[TurnGap]]:
    """The bars and gaps of each lane's turns between two Unix times."""
    bars: list[TurnBar] = []
    gaps: list[TurnGap] = []
    for number, turns in enumerate(lanes):
        shown = [turn for turn in turns if _end(turn, now) >= since and turn.state != "left"]
        shown = sorted(shown, key=lambda turn: turn.arrived)[-(MOST_BARS // len(lanes)) :]
        last: float | None = None
        for turn in shown:
            if last is not None and turn.arrived > last:
                gaps.append(TurnGap(number, last, turn.arrived))
            end = _end(turn, now)
            lost = _lost_share(turn) >= NOTABLE
            bars.append(TurnBar(number, turn.arrived, end, shade(turn), lost, turn.request))
            last = end if last is None else max(last, end)
    return bars, gaps


def _lost_share(turn: SeenRequest) -> float:
    """The share of a turn's prompt tokens that were lost."""
    account = turn.outcome.cache if turn.outcome is not None else None
    return account.lost / turn.prompt_tokens if account is not None and turn.prompt_tokens else 0.0


def turn_text(turn: SeenRequest, turns: Iterable[SeenRequest], now: float) -> str:
    """The times and the account of a turn in lines, with its wait after the earlier of `turns`."""
    ends = [_end(other, now) for other in turns if other.arrived < turn.arrived]
    wait = turn.arrived - max(ends, default=turn.arrived)
    return "\n".join(_lines(turn, wait))[:MOST_TEXT]


def shade(turn: SeenRequest) -> int:
    """The class of the share of a turn's prompt that was cached."""
    if turn.outcome is None:
        return RUNNING
    account = turn.outcome.cache
    if account is None or not account.prompt_tokens:
        return UNKNOWN
    return min(int(SHARES * account.reused / account.prompt_tokens), SHARES - 1)


def _end(turn: SeenRequest, now: float) -> float:
    return turn.outcome.time if turn.outcome is not None else max(now, turn.arrived)


def _lines(turn: SeenRequest, wait: float) -> Iterator[str]:
    outcome = turn.outcome
    yield f"turn {turn.turn}: {printable(turn.request)[:80]}"
    if outcome is None:
        yield f"{turn.state} since {clock_text(turn.arrived)}, {turn.generated:,} tokens so far"
    else:
        span = f"{clock_text(turn.arrived)} to {clock_text(outcome.time)}"
        yield f"{span}, {time_text(outcome.total_s)}"
    if wait > 0:
        yield f"{time_text(wait)} after the end of the turn before it (tools)"
    if turn.prompt_tokens:
        yield f"prompt {turn.prompt_tokens:,} tokens"
    if outcome is not None and outcome.cache is not None:
        yield from _account(outcome.cache)


def _account(account: CacheAccount) -> Iterator[str]:
    yield f"reused {account.reused:,}, lost {account.lost:,}, new {account.new:,}"
    lost: dict[str, int] = {}
    for loss in account.losses:
        lost[loss.reason] = lost.get(loss.reason, 0) + loss.tokens
    for reason, tokens in sorted(lost.items(), key=lambda item: -item[1]):
        yield f"  lost {tokens:,}: {printable(reason_text(reason))}"
    if account.change is not None:
        yield printable(change_line(account.change))
