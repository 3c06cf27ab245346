"""Admission per agent: when KV memory runs short, whole agents pause between turns.

In the manner of ThunderAgent (arXiv 2602.13692): an agent is a program that alternates between
reasoning (a request in flight) and acting (a tool runs). Pausing a few at tool boundaries keeps
the others' context cached, instead of every turn evicting somebody else's.
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
AHEAD_S = 5.0  # how long before a request's deadline a pause ends: time to be placed twice
Place = tuple[str, int]


@dataclass(slots=True)
class Program:
    """One agent. `place` is the rank that holds its context.

    `tokens` is what its context adds there to those of other agents: prompts begin alike.
    """

    tokens: float
    context: int
    used: float
    place: Place | None = None
    held: tuple[int, PrefixNode] | None = None
    running: set[str] = field(default_factory=set)
    acting_since: float = 0.0
    paused: bool = False
    pausing: bool = False
    demoted: bool = False
    resumed: bool = False
    overdue: bool = False
    wants_since: float | None = None

    def grow(self, tokens: int) -> None:
        self.tokens += max(tokens, 0)
        self.context += max(tokens, 0)


class ProgramPolicy(Policy):
    """KV cost for admitted agents; reviews every `program_tick_s` who pauses, yields or resumes.

    A review goes: demote, resume, pause. Past `program_demote` of a rank's blocks its smallest
    agents yield in the queue; paused agents that want to go on resume where they fit best, below
    `program_pause` less `program_hysteresis`; past `program_pause` the smallest agents pause, at
    the next tool boundary, until `program_pause_target` is reached. Nobody who wants to go on is
    paused for more than `program_resume_s`, or until its request would be refused; and a request
    that a pause has cost half its time does not queue besides. Requests without a session are not
    held back.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._programs: dict[str, Program] = {}
        self._program_of: dict[str, str] = {}
        self._held = PrefixTree()
        self._table: RankTable | None = None
        self._reviewed = -math.inf

    @property
    def follows(self) -> float:
        return 600.0

    def choose(self, view: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        self._table = view.table
        cost = model.cost(view)
        program = self._programs.get(view.request.hints.session or "")
        if program is not None and program.resumed and program.place is not None:
            at = view.find(*program.place)
            if at is not None:
                return PolicyChoice(at, cost, "resumed where it fits best")
        return PolicyChoice(pick(cost, model.temperature, rng), cost)

    # admission

    def admits(self, request: RouteRequest, now: float) -> bool:
        key = request.hints.session
        if not key:
            return True
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(request.tokens, request.tokens, now)
            program.paused = self._full(now)
        program.used = now
        if program.paused:
            program.grow(request.tokens - program.context)
            program.wants_since = now if program.wants_since is None else program.wants_since
        waited = now - program.wants_since if program.wants_since is not None else 0.0
        program.overdue = waited >= request.deadline_s / 2
        if program.paused and waited >= self._patience(request):
            self._resume(program, None)
        return not program.paused

    def _patience(self, request: RouteRequest) -> float:
        """Seconds for which the request may find its agent paused."""
        until = request.deadline_s - min(AHEAD_S, request.deadline_s / 2)
        return min(self._settings.program_resume_s, until)

    def shift(self, request: RouteRequest) -> float:
        program = self._programs.get(request.hints.session or "")
        if program is None:
            return 0.0
        if program.overdue:
            return math.inf
        boost = self._settings.program_boost_s if program.resumed else 0.0
        return boost - (self._settings.program_demote_s if program.demoted else 0.0)

    # life of a program

    def placed(self, decision: Decision, now: float) -> None:
        key = decision.hints.session
        if not key:
            return
        program = self._programs.setdefault(key, Program(0, 0, now))
        self._settle(program, decision)
        program.running.add(decision.request)
        program.paused = program.overdue = False
        program.wants_since, program.used = None, now
        self._program_of[decision.request] = key
        if decision.hints.session_final:
            program.pausing = False
            program.used = now - FORGET_S

    def _settle(self, program: Program, decision: Decision) -> None:
        """Its context is where it was placed, and only there."""
        self._unsettle(program)
        chosen = decision.chosen
        program.place = chosen.instance, chosen.rank
        program.context, program.tokens = decision.tokens, float(decision.tokens)
        slot = self._table.known(*program.place) if self._table is not None else None
        if slot is not None:
            end, new = self._held.add(slot, decision.sequence_hashes)
            program.held = slot, end
            shared = len(decision.sequence_hashes) // HASH_BYTES - new
            program.tokens -= shared * decision.block_size

    def _unsettle(self, program: Program) -> None:
        """It holds no place: others count all of what they shared with it."""
        if program.held is not None:
            slot, end = program.held
            self._held.drop(end, slot)
            program.held = None

    def finished(self, outcome: Outcome, now: float) -> None:
        program = self._programs.get(self._program_of.pop(outcome.request, ""))
        if program is None:
            return
        program.grow(outcome.output_tokens)
        self._rest(program, outcome.request, now)

    def freed(self, request: str, now: float) -> None:
        program = self._programs.get(self._program_of.get(request, ""))
        if program is not None:
            self._rest(program, request, now)

    def _rest(self, program: Program, request: str, now: float) -> None:
        """One of its requests is over."""
        if request not in program.running:
            return
        program.running.discard(request)
        program.acting_since = now
        program.resumed = False
        if program.pausing and not program.running:
            self._halt(program)

    def tick(self, now: float) -> None:
        if now - self._reviewed < self._settings.program_tick_s:
            return
        self._reviewed = now
        self._forget(now)
        if self._table is not None:
            ranks = self._ranks(self._table)
            self._demote(ranks, now)
            self._resume_waiting(ranks, now)
            self._pause(ranks, now)

    def _forget(self, now: float) -> None:
        idle = [k for k, p in self._programs.items() if not p.running and now - p.used > FORGET_S]
        for key in idle:
            self._unsettle(self._programs.pop(key))
        if idle:
            known = self._program_of.items()
            self._program_of = {r: key for r, key in known if key in self._programs}

    # review

    def _demote(self, ranks: dict[Place, float], now: float) -> None:
        for place, capacity in ranks.items():
            room = self._settings.program_demote * capacity
            for program in sorted(self._at(place), key=_size, reverse=True):
                room -= self._weight(program, now)
                program.demoted = room < 0

    def _resume_waiting(self, ranks: dict[Place, float], now: float) -> None:
        settings = self._settings
        share = settings.program_pause - settings.program_hysteresis
        rooms = {p: share * capacity - self._load(p, now) for p, capacity in ranks.items()}
        wanting = [p for p in self._programs.values() if p.paused and p.wants_since is not None]
        for program in sorted(wanting, key=_size, reverse=True):
            fits = {place: room for place, room in rooms.items() if room >= program.tokens}
            if fits:
                best = min(fits, key=lambda place: fits[place])
                rooms[best] -= program.tokens
                self._resume(program, best)

    def _resume(self, program: Program, place: Place | None) -> None:
        program.paused = False
        program.resumed = True
        program.place = place

    def _pause(self, ranks: dict[Place, float], now: float) -> None:
        """Acting agents pause at once, reasoning ones when their request is done."""
        settings = self._settings
        for place, capacity in ranks.items():
            load = self._load(place, now)
            if load <= settings.program_pause * capacity:
                continue
            for program in sorted(self._at(place), key=lambda p: (bool(p.running), p.tokens)):
                if load <= settings.program_pause_target * capacity:
                    break
                load -= self._weight(program, now)
                program.pausing = True
                if not program.running:
                    self._halt(program)

    def _halt(self, program: Program) -> None:
        program.paused, program.pausing = True, False
        self._unsettle(program)

    # measures

    def _ranks(self, table: RankTable) -> dict[Place, float]:
        """Tokens that fit each rank."""
        return {
            key: float(table.total_blocks[slot]) * table.block_size
            for key, slot in table.slot_of.items()
            if table.total_blocks[slot]
        }

    def _at(self, place: Place) -> Iterable[Program]:
        return [p for p in self._programs.values() if p.place == place and not p.paused]

    def _load(self, place: Place, now: float) -> float:
        return sum(self._weight(program, now) for program in self._at(place))

    def _weight(self, program: Program, now: float) -> float:
        """Its tokens; while a tool runs, for ever less."""
        if program.running:
            return program.tokens
        settings = self._settings
        age = max(now - program.acting_since, 0.0) / settings.program_acting_tau_s
        return program.tokens * settings.program_acting_weight * math.exp(-age)

    def _full(self, now: float) -> bool:
        """Whether no rank has room for one more agent."""
        ranks = self._ranks(self._table) if self._table is not None else {}
        share = self._settings.program_pause
        return bool(ranks) and all(self._load(p, now) > share * c for p, c in ranks.items())


def _size(program: Program) -> float:
    return program.tokens
