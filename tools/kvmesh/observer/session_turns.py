"""The turns of a session: what each found in the cache, and where its prompt diverged. Pure."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from kvmesh.bus.messages import Decision, Outcome, PromptChange, RouteEvent
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.cache_text import change_line, reason_text
from kvmesh.runtime.quantities import counted


class SessionTurns:
    """The outcomes of the sessions with a name, the last `limit` of them, and their totals.

    `continued` has the decision about the turn after each, by the request of the earlier one, if
    routers had expected its return.
    """

    def __init__(self, session: str, limit: int) -> None:
        self._session = session
        self.turns: deque[Outcome] = deque(maxlen=limit)
        self.continued: OrderedDict[str, Decision] = OrderedDict()
        self._limit = limit
        self.count = 0
        self.tenants: set[str] = set()
        self._lost: dict[str, int] = {}
        self._prompt = self._reused = self._new = self._possible = self._unknown = 0
        self._latest: PromptChange | None = None

    def follow(self, event: RouteEvent) -> None:
        """Follow a decision or an outcome, if it is of the session."""
        if isinstance(event, Outcome):
            self.add(event)
        elif event.expected is not None and own_name(event.hints.session or "") == self._session:
            self.continued[event.expected.after] = event
            if len(self.continued) > self._limit:
                self.continued.popitem(last=False)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome, if it is of the session."""
        if own_name(outcome.session) != self._session or outcome.choice:
            return
        self.count += 1
        self.turns.append(outcome)
        self.tenants.add(outcome.tenant)
        self._prompt += outcome.prompt_tokens
        account = outcome.cache
        if account is None:
            self._unknown += outcome.prompt_tokens
            return
        self._reused += account.reused
        self._new += account.new
        self._possible += account.possible
        self._latest = account.change
        for loss in account.losses:
            self._lost[loss.reason] = self._lost.get(loss.reason, 0) + loss.tokens

    def summary(self) -> Iterator[str]:
        """Lines about all turns together."""
        if not self.count:
            return
        named = f" of {len(self.tenants)} tenants" if len(self.tenants) > 1 else ""
        yield (
            f"session {self._session}{named}: {counted(self.count, 'request')},"
            f" {self._prompt:,} prompt tokens, {_share(self._reused, self._prompt)} reused"
            f" ({_share(self._possible, self._prompt)} in an endless cache)"
        )
        yield f"reused {self._reused:,}, lost {sum(self._lost.values()):,}, new {self._new:,}"
        for reason, tokens in sorted(self._lost.items(), key=lambda item: -item[1]):
            yield f"  lost {tokens:,}: {reason_text(reason)}"
        if self._unknown:
            yield f"  {self._unknown:,} of requests whose engine did not count cached tokens"
        if self._latest is not None:
            yield f"in its last turn {change_line(self._latest)}"


def _share(tokens: int, total: int) -> str:
    return f"{100 * tokens / total:.1f} %" if total else "nothing"
