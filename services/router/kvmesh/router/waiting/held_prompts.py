"""Placed prompts that the router holds until their rank has few tokens left to compute.

An engine fills each step with the prompts that wait, in order of arrival: two that share a step
both wait for its end. Held back and sent one after the other, the shortest first, the same prompts
have their first tokens sooner, and the last one as soon as before (ADR 48).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from kvmesh.bus.messages import Decision, SeqAdd, SeqEvent, SeqFree, SeqPrefilled
from kvmesh.placement_rules.holding import HOLD_S, fixed_tokens, has_turn, yielded_s
from kvmesh.router.state.active_sequences import ActiveSequences
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.router.state.rank_table import RankTable
from kvmesh.router.state.running_prefills import RunningPrefills
from kvmesh.router.waiting.ticket import Ticket


@dataclass(slots=True, eq=False)
class HeldPrompt:
    """A placed request; `tokens` are those to compute on the rank of `slot`, `events` unpublished.

    `key` is its order among those of the rank; after `until` it is sent in any case.
    """

    ticket: Ticket
    decision: Decision
    events: list[SeqAdd]
    slot: int
    tokens: float
    key: float
    until: float


class HeldPrompts:
    """Held prompts by rank. Their tokens are the table's `held_tokens`.

    A prompt whose engine first loads blocks from a lower tier is sent at once, and the engine has
    time for others meanwhile. Requests that wait for a prefix have not been sent either.
    """

    def __init__(self, table: RankTable, prefills: RunningPrefills, speeds: RankSpeeds) -> None:
        self._table = table
        self._prefills = prefills
        self._speeds = speeds
        self._prompts: dict[str, HeldPrompt] = {}
        self._ranks: dict[int, list[tuple[int, float, int, HeldPrompt]]] = {}
        self._ends: list[tuple[float, int, HeldPrompt]] = []
        self._count = 0
        self._loading: dict[str, tuple[int, float]] = {}  # slot, tokens
        self._loading_tokens: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, request: str) -> bool:
        return request in self._prompts

    @property
    def tickets(self) -> list[Ticket]:
        return [prompt.ticket for prompt in self._prompts.values()]

    @property
    def tokens(self) -> int:
        return int(sum([prompt.tokens for prompt in self._prompts.values()]))

    def add(
        self,
        ticket: Ticket,
        decision: Decision,
        events: list[SeqAdd],
        key: float,
        tier: int,
        now: float,
    ) -> None:
        """Hold a request that `decision` placed; `key` is its position in the tier, in seconds."""
        table = self._table
        slot, tokens = self._work(decision)
        position = key + yielded_s(tokens, max(table.cells.step_tokens[slot], 1.0))
        until = now + min(HOLD_S, max(ticket.deadline - now, 0.0) / 2)
        prompt = HeldPrompt(ticket, decision, events, slot, tokens, position, until)
        self.drop(ticket.request.request)
        self._prompts[ticket.request.request] = prompt
        self._count += 1
        heapq.heappush(self._ends, (until, self._count, prompt))
        heapq.heappush(self._ranks.setdefault(slot, []), (-tier, prompt.key, self._count, prompt))
        table.cells.held_tokens[slot] += tokens

    def is_served(self, prompt: HeldPrompt) -> bool:
        """True unless the worker of the decision is gone or takes no more requests."""
        card = self._table.cards.get(prompt.decision.chosen.instance)
        return card is not None and not card.draining

    def note_loading(self, decision: Decision) -> bool:
        """Count a request as sent whose engine first loads blocks; False if it loads none."""
        if not sum(decision.chosen.overlap[1:]):
            return False
        self._end_load(decision.request)  # it was sent before
        slot, tokens = self._loading[decision.request] = self._work(decision)
        self._loading_tokens[slot] = self._loading_tokens.get(slot, 0.0) + tokens
        return True

    def apply(self, event: SeqEvent) -> None:
        """A request may have its first token, or have ended."""
        if type(event) is SeqPrefilled or type(event) is SeqFree:
            self._end_load(event.request)

    def _end_load(self, request: str) -> None:
        slot, tokens = self._loading.pop(request, (0, 0.0))
        if tokens:
            self._loading_tokens[slot] -= tokens

    def forget_lost(self, active: ActiveSequences) -> None:
        """Forget the loads of requests that are no longer active: their ends were lost."""
        for request in [request for request in self._loading if request not in active]:
            self._end_load(request)

    def _work(self, decision: Decision) -> tuple[int, float]:
        """The slot that computes a prompt, and how many of its tokens."""
        table, rank = self._table, decision.chosen
        tokens = decision.tokens - sum(rank.overlap) * table.block_size
        return table.slot(rank.instance, rank.rank), float(max(tokens, 0))

    def drop(self, request: str) -> Ticket | None:
        prompt = self._prompts.pop(request, None)
        if prompt is None:
            return None
        held = self._table.cells.held_tokens
        held[prompt.slot] = max(held[prompt.slot] - prompt.tokens, 0.0)
        return prompt.ticket

    def take_due(self, now: float) -> list[HeldPrompt]:
        """Take the prompts to send now, or to place anew if their worker is not `is_served`."""
        ready = list(self._take_overdue(now))
        for slot in list(self._ranks):
            ready += self._take_ready_of(slot, now)
            if not self._ranks[slot]:
                del self._ranks[slot]
        return ready

    def _take_overdue(self, now: float) -> Iterator[HeldPrompt]:
        """Take the prompts that have been held for as long as they may be, whatever their order."""
        while self._ends and (self._ends[0][0] <= now or not self._holds(self._ends[0][2])):
            _, _, prompt = heapq.heappop(self._ends)
            if self._holds(prompt):
                self.drop(prompt.ticket.request.request)
                yield prompt

    def _holds(self, prompt: HeldPrompt) -> bool:
        return self._prompts.get(prompt.ticket.request.request) is prompt

    def _take_ready_of(self, slot: int, now: float) -> Iterator[HeldPrompt]:
        """Take prompts in order while the engine has few tokens to compute."""
        table, heap = self._table, self._ranks[slot]
        cells, card = table.cells, table.cards.get(table.ranks[slot].instance)
        here = card is not None and not card.draining
        step = cells.step_tokens[slot]
        fixed = self._fixed_tokens(slot)
        while heap:
            _, _, _, prompt = heap[0]
            if self._holds(prompt):
                elsewhere = self._loading_tokens.get(slot, 0.0)
                elsewhere += self._prefills.waiting_tokens(slot)
                waiting = max(cells.prefill_tokens[slot] - elsewhere, 0.0)
                sent = max(waiting - cells.held_tokens[slot], 0.0)
                if step and here and not has_turn(prompt.tokens, sent, waiting, fixed):
                    return
                self.drop(prompt.ticket.request.request)
                yield prompt
            heapq.heappop(heap)

    def _fixed_tokens(self, slot: int) -> float:
        """Prompt tokens that a rank computes in the time that a step takes besides its prompts."""
        cells = self._table.cells
        step, requests = cells.step_tokens[slot], cells.requests[slot]
        empty = fixed_tokens(step)
        decoding = max(requests - self._prefills.count(slot), 0.0)
        if not decoding:
            return empty
        used = min(cells.active_blocks[slot] / max(cells.total_blocks[slot], 1.0), 1.0)
        used *= decoding / requests
        return fixed_tokens(step, self._speeds.decode_tokens(used, decoding, empty))
