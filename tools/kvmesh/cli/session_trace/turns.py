"""The turns of a session, from routing decisions and outcomes; pure."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from kvmesh.bus.messages import Decision
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.pauses import wait_text
from kvmesh.observer.prefetch_uses import base_id
from kvmesh.workload.capture import CapturedRound

TOOLS, USER = "tools", "user"


class SessionTurn(Struct, frozen=True, kw_only=True):
    """One request of a session; times in Unix seconds, `first_token` None if there was none.

    The frontend received it at `start`; a router had it from `routed` to `placed`. `after` is the
    end of the session's previous turn, if that was before the start, and `waits_for` the reason of
    the pause: the tool that the previous answer called, or the user.
    """

    session: str
    parent: str
    number: int
    round: CapturedRound
    start: float
    routed: float
    placed: float
    first_token: float | None
    end: float
    after: float | None = None
    waits_for: str = ""

    @property
    def decision(self) -> Decision:
        return self.round.decision

    @property
    def request(self) -> str:
        return base_id(self.decision.request)

    @property
    def worker(self) -> str:
        return self.decision.chosen.worker

    @property
    def prefill_worker(self) -> str:
        """The worker that computed the prompt."""
        prefill = self.decision.prefill
        return self.worker if prefill is None else prefill.worker


def session_rounds(rounds: Iterable[CapturedRound], session: str) -> list[CapturedRound]:
    """The rounds of `session`, and of its subagents and theirs, by arrival.

    Sessions of tenants are named as their callers name them.
    """
    named = [r for r in rounds if r.decision.hints.session]
    known = {name for r in named if own_name(name := r.decision.hints.session or "") == session}
    while True:
        children = {
            r.decision.hints.session or ""
            for r in named
            if r.decision.hints.parent_session in known
        } - known
        if not children:
            break
        known |= children
    return [r for r in named if r.decision.hints.session in known]


def session_turns(rounds: Iterable[CapturedRound]) -> Iterator[SessionTurn]:
    """Each round as a turn, with its phases in order although clocks differ."""
    numbers: dict[str, int] = {}
    previous: dict[str, CapturedRound] = {}
    for captured in rounds:
        decision, outcome = captured.decision, captured.outcome
        name = decision.hints.session or ""
        start, end = outcome.time - outcome.total_s, outcome.time
        placed = min(max(decision.time, start), end)
        first = None if outcome.ttft_s is None else min(max(start + outcome.ttft_s, placed), end)
        before = previous.get(name)
        follows = before is not None and before.end <= start
        numbers[name] = numbers.get(name, 0) + 1
        yield SessionTurn(
            session=own_name(name),
            parent=own_name(decision.hints.parent_session or ""),
            number=numbers[name],
            round=captured,
            start=start,
            routed=min(max(decision.time - decision.wait_s, start), placed),
            placed=placed,
            first_token=first,
            end=end,
            after=before.end if before is not None and follows else None,
            waits_for=_reason(before) if before is not None and follows else "",
        )
        if before is None or end >= before.end:
            previous[name] = captured


def _reason(before: CapturedRound) -> str:
    """In words; the outcome of an older frontend tells tools from the user only."""
    outcome = before.outcome
    if outcome.waits_for:
        return wait_text(outcome.waits_for)
    return TOOLS if outcome.finish == "tool_calls" else USER
