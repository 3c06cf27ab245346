"""The turns of a session: what each found in the cache, and where its prompt diverged. Pure."""

from collections import deque
from collections.abc import Iterator
from datetime import datetime

from rich.table import Table

from kvmesh.bus.messages import CacheAccount, Outcome, PromptChange
from kvmesh.cli.units import literal
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.cache_text import change_line, part, reason_text
from kvmesh.runtime.quantities import counted


class SessionTurns:
    """The outcomes of the sessions with a name, the last `limit` of them, and their totals."""

    def __init__(self, session: str, limit: int) -> None:
        self._session = session
        self.turns: deque[Outcome] = deque(maxlen=limit)
        self.count = 0
        self.tenants: set[str] = set()
        self._lost: dict[str, int] = {}
        self._prompt = self._reused = self._new = self._possible = self._unknown = 0
        self._latest: PromptChange | None = None

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

    def table(self) -> Table:
        """A row for each turn, the oldest first."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("request", "ended"):
            table.add_column(heading, no_wrap=True)
        for heading in ("prompt", "reused", "lost", "new"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("first token", justify="right", no_wrap=True)
        for heading in ("worker", "lost for"):
            table.add_column(heading)
        for outcome in self.turns:
            account, ttft = outcome.cache, outcome.ttft_s
            table.add_row(
                outcome.request,
                f"{datetime.fromtimestamp(outcome.time).astimezone():%H:%M:%S}",
                f"{outcome.prompt_tokens:,}",
                *_counts(account),
                "–" if ttft is None else f"{ttft * 1000:,.0f} ms",
                outcome.instance,
                literal(_reasons(account)),
            )
        return table


def _counts(account: CacheAccount | None) -> list[str]:
    if account is None:
        return ["–"] * 3
    return [f"{count:,}" for count in (account.reused, account.lost, account.new)]


def _reasons(account: CacheAccount | None) -> str:
    """The reasons of the losses, the largest first, with the part of the prompt that changed."""
    if account is None:
        return ""
    lost = {loss.reason: 0 for loss in account.losses}
    for loss in account.losses:
        lost[loss.reason] += loss.tokens
    reasons = [reason_text(reason) for reason, _ in sorted(lost.items(), key=lambda i: -i[1])]
    if account.change is not None:
        reasons.append(f"{part(account.change)} {account.change.way}")
    return "; ".join(reasons)


def _share(tokens: int, total: int) -> str:
    return f"{100 * tokens / total:.1f} %" if total else "nothing"
