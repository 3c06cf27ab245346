"""Program policy: admission per agent; when KV memory is short, agents pause between turns.

After ThunderAgent (arXiv 2602.13692): an agent is a program that alternates between reasoning (a
request runs) and acting (a tool runs). Pausing a few agents at tool boundaries keeps the others'
context cached, where otherwise each turn evicts the context of another agent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from kvmesh.bus.messages import Decision, Outcome, RouteRequest
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.policies.base import Policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree
from kvmesh.router.state.rank_table import RankTable
from kvmesh.settings.schema import RouterSettings

FORGET_S = 3600.0
RESUME_MARGIN_S = 5.0  # a pause ends this long before the deadline: time for two placements
RankId = tuple[str, int]


@dataclass(slots=True)
class Program:
    """One agent. `rank` holds its context of `context` tokens.

    `tokens` leaves out the prefix that other agents on that rank share.
    """

    tokens: float
    context: int
    last_used: float
    rank: RankId | None = None
    prefix: tuple[int, PrefixNode] | None = None
    running: set[str] = field(default_factory=set)
    acting_since: float = 0.0
    paused: bool = False
    pausing: bool = False
    demoted: bool = False
    resumed: bool = False
    overdue: bool = False
    waiting_since: float | None = None

    def grow(self, tokens: int) -> None:
        self.tokens += max(tokens, 0)
        self.context += max(tokens, 0)


class ProgramPolicy(Policy):
    """KV cost for admitted agents; demotes, resumes and pauses agents every `program_tick_s`.

    Past `program_demote` of a rank's blocks, its smallest agents are demoted in the queue. Paused
    agents with a waiting request resume on the rank where they fit best, below `program_pause` less
    `program_hysteresis`. Past `program_pause` the smallest agents pause, at their next tool
    boundary, until `program_pause_target` is reached. An agent with a waiting request is paused for
    at most `program_resume_s`, and resumes before the request's deadline; a request delayed by a
    pause for half its deadline skips the queue. Requests without a session are always admitted.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._programs: dict[str, Program] = {}
        self._program_of: dict[str, str] = {}
        self._prefixes = PrefixTree()
        self._table: RankTable | None = None
        self._reviewed = -math.inf

    @property
    def history_s(self) -> float:
        return 600.0

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        self._table = candidates.table
        cost = model.cost(candidates)
        program = self._programs.get(candidates.request.hints.session or "")
        if program is not None and program.resumed and program.rank is not None:
            index = candidates.index_of(*program.rank)
            if index is not None:
                return PolicyChoice(index, cost, "resumed where it fits best")
        return PolicyChoice(pick(cost, model.temperature, rng), cost)

    # admission

    def admits(self, request: RouteRequest, now: float) -> bool:
        key = request.hints.session
        if not key:
            return True
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(request.tokens, request.tokens, now)
            program.paused = self._all_full(now)
        program.last_used = now
        if program.paused:
            program.grow(request.tokens - program.context)
            program.waiting_since = now if program.waiting_since is None else program.waiting_since
        waited = now - program.waiting_since if program.waiting_since is not None else 0.0
        program.overdue = waited >= request.deadline_s / 2
        if program.paused and waited >= self._max_pause(request):
            self._resume(program, None)
        return not program.paused

    def _max_pause(self, request: RouteRequest) -> float:
        """Maximum seconds that a request waits for its paused agent."""
        until = request.deadline_s - min(RESUME_MARGIN_S, request.deadline_s / 2)
        return min(self._settings.program_resume_s, until)

    def queue_boost_s(self, request: RouteRequest) -> float:
        program = self._programs.get(request.hints.session or "")
        if program is None:
            return 0.0
        if program.overdue:
            return math.inf
        boost = self._settings.program_boost_s if program.resumed else 0.0
        return boost - (self._settings.program_demote_s if program.demoted else 0.0)

    # requests of a program

    def on_placed(self, decision: Decision, now: float) -> None:
        key = decision.hints.session
        if not key:
            return
        program = self._programs.setdefault(key, Program(0, 0, now))
        self._record_rank(program, decision)
        program.running.add(decision.request)
        program.paused = program.overdue = False
        program.waiting_since, program.last_used = None, now
        self._program_of[decision.request] = key
        if decision.hints.session_final:
            program.pausing = False
            program.last_used = now - FORGET_S

    def _record_rank(self, program: Program, decision: Decision) -> None:
        """Move the program's context to the rank of the decision."""
        self._release_prefix(program)
        chosen = decision.chosen
        program.rank = chosen.instance, chosen.rank
        program.context, program.tokens = decision.tokens, float(decision.tokens)
        slot = self._table.find_slot(*program.rank) if self._table is not None else None
        if slot is not None:
            end, new = self._prefixes.add(slot, decision.sequence_hashes)
            program.prefix = slot, end
            shared = len(decision.sequence_hashes) // HASH_BYTES - new
            program.tokens -= shared * decision.block_size

    def _release_prefix(self, program: Program) -> None:
        """Release the program's prefix; other programs then count what they shared with it."""
        if program.prefix is not None:
            slot, end = program.prefix
            self._prefixes.drop(end, slot)
            program.prefix = None

    def on_finished(self, outcome: Outcome, now: float) -> None:
        program = self._programs.get(self._program_of.pop(outcome.request, ""))
        if program is None:
            return
        program.grow(outcome.output_tokens)
        self._end_request(program, outcome.request, now)

    def on_freed(self, request: str, now: float) -> None:
        program = self._programs.get(self._program_of.get(request, ""))
        if program is not None:
            self._end_request(program, request, now)

    def _end_request(self, program: Program, request: str, now: float) -> None:
        """End one request; a program marked for a pause pauses after its last one."""
        if request not in program.running:
            return
        program.running.discard(request)
        program.acting_since = now
        program.resumed = False
        if program.pausing and not program.running:
            self._set_paused(program)

    def tick(self, now: float) -> None:
        if now - self._reviewed < self._settings.program_tick_s:
            return
        self._reviewed = now
        self._forget(now)
        if self._table is not None:
            ranks = self._capacities(self._table)
            self._demote(ranks, now)
            self._resume_waiting(ranks, now)
            self._pause(ranks, now)

    def _forget(self, now: float) -> None:
        idle = [
            k for k, p in self._programs.items() if not p.running and now - p.last_used > FORGET_S
        ]
        for key in idle:
            self._release_prefix(self._programs.pop(key))
        if idle:
            known = self._program_of.items()
            self._program_of = {r: key for r, key in known if key in self._programs}

    # review

    def _demote(self, ranks: dict[RankId, float], now: float) -> None:
        for rank, capacity in ranks.items():
            free_tokens = self._settings.program_demote * capacity
            for program in sorted(self._active_on(rank), key=_size, reverse=True):
                free_tokens -= self._weight(program, now)
                program.demoted = free_tokens < 0

    def _resume_waiting(self, ranks: dict[RankId, float], now: float) -> None:
        settings = self._settings
        share = settings.program_pause - settings.program_hysteresis
        free = {rank: share * capacity - self._load(rank, now) for rank, capacity in ranks.items()}
        waiting = [p for p in self._programs.values() if p.paused and p.waiting_since is not None]
        for program in sorted(waiting, key=_size, reverse=True):
            fits = {
                rank: free_tokens
                for rank, free_tokens in free.items()
                if free_tokens >= program.tokens
            }
            if fits:
                best = min(fits, key=lambda rank: fits[rank])
                free[best] -= program.tokens
                self._resume(program, best)

    def _resume(self, program: Program, rank: RankId | None) -> None:
        program.paused = False
        program.resumed = True
        program.rank = rank

    def _pause(self, ranks: dict[RankId, float], now: float) -> None:
        """Pause the smallest agents: acting ones at once, reasoning ones after their request."""
        settings = self._settings
        for rank, capacity in ranks.items():
            load = self._load(rank, now)
            if load <= settings.program_pause * capacity:
                continue
            for program in sorted(self._active_on(rank), key=lambda p: (bool(p.running), p.tokens)):
                if load <= settings.program_pause_target * capacity:
                    break
                load -= self._weight(program, now)
                program.pausing = True
                if not program.running:
                    self._set_paused(program)

    def _set_paused(self, program: Program) -> None:
        program.paused, program.pausing = True, False
        self._release_prefix(program)

    # measures

    def _capacities(self, table: RankTable) -> dict[RankId, float]:
        """KV capacity of each rank in tokens, where known."""
        return {
            key: float(table.total_blocks[slot]) * table.block_size
            for key, slot in table.slot_of.items()
            if table.total_blocks[slot]
        }

    def _active_on(self, rank: RankId) -> Iterable[Program]:
        return [p for p in self._programs.values() if p.rank == rank and not p.paused]

    def _load(self, rank: RankId, now: float) -> float:
        return sum(self._weight(program, now) for program in self._active_on(rank))

    def _weight(self, program: Program, now: float) -> float:
        """The program's tokens; while a tool runs, decaying with time."""
        if program.running:
            return program.tokens
        settings = self._settings
        age = max(now - program.acting_since, 0.0) / settings.program_acting_tau_s
        return program.tokens * settings.program_acting_weight * math.exp(-age)

    def _all_full(self, now: float) -> bool:
        """True if every rank is past `program_pause`."""
        ranks = self._capacities(self._table) if self._table is not None else {}
        share = self._settings.program_pause
        return bool(ranks) and all(
            self._load(rank, now) > share * capacity for rank, capacity in ranks.items()
        )


def _size(program: Program) -> float:
    return program.tokens
