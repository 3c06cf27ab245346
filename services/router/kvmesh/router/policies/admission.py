"""Admission of agents: while contexts exceed the memory, some agents rest between their turns.

An agent alternates between a request and a tool. If more agents take turns than the memory holds
contexts, each turn evicts what another agent is about to need. Resting a few keeps the contexts of
the others (ThunderAgent, arXiv 2602.13692; Concur, arXiv 2601.22705).
"""

from collections import defaultdict, deque
from math import inf
from random import Random
from typing import NamedTuple

from kvmesh.bus.messages import Decision, Outcome, RouteRequest
from kvmesh.returns.forecaster import ReturnChance
from kvmesh.router.policies.active_agents import ActiveAgents, AgentState, RankId
from kvmesh.router.policies.agent_window import AgentWindow
from kvmesh.router.policies.base import Kv, Returns
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel
from kvmesh.router.state.rank_speeds import RankSpeeds

HISTORY_S = 600.0
MARGIN_S = 5.0  # a rest ends this long before the deadline: time for two placements
LEAD_S = 15.0  # before that, others leave for the agent
# An active agent keeps its place for so many times `break_even_s` before others replace it.
QUANTA = 2.0
REVIEW_S = 0.25
MAX_SUBAGENTS = 8  # that go with one agent
LEAST_BREAK_EVEN_S = 6.0  # below, contexts are computed faster than agents can change places


class RestCandidate(NamedTuple):
    """An active agent that may rest, and the probability that it is back soon."""

    session: str
    agent: AgentState
    back: ReturnChance


class AgentAdmission(Kv):
    """`Kv`, and a window of active agents on each rank while agents lose their contexts.

    Decisions and outcomes of all routers determine who is active, so that routers agree but for
    the messages under way. Each router admits its own requests; `waiting` are the agents that rest
    with one, by session. Requests without a session are always admitted, and so are all while the
    window is open. `rests` counts rests by what ended them.
    """

    def __init__(self) -> None:
        self.window = AgentWindow()
        self.agents = ActiveAgents()
        self.rests: dict[str, int] = {"room": 0, "deadline": 0, "share": 0}
        self.waiting: dict[str, AgentState] = {}
        self._limits: dict[RankId, float] = {}
        self._free: dict[RankId, float] = {}
        self._owned: dict[str, float] = {}
        self._reviewed = -inf

    @property
    def history_s(self) -> float:
        return HISTORY_S

    def follow(self, returns: Returns | None, speeds: RankSpeeds) -> None:
        self.agents.returns, self.agents.speeds = returns, speeds

    @property
    def active(self) -> int:
        """The agents that have a place."""
        return sum(agent.active for _, agent in self.agents)

    # placements

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        self.agents.table = candidates.table
        choice = super().choose(candidates, model, rng)
        agent = self.agents.find(candidates.request.hints.session)
        if agent is None or not agent.admitted or not agent.waited_s:
            return choice
        note = f"rested {agent.waited_s:.1f} s for a place among the active agents"
        chosen = choice.chosen
        if agent.rank is not None:
            reserved = candidates.index_of(*agent.rank)
            chosen = chosen if reserved is None else reserved
        return PolicyChoice(chosen, choice.cost, note)

    def on_placed(self, decision: Decision, now: float) -> None:
        turn = self.agents.placed(decision, self.window.open, now)
        self.waiting.pop(decision.hints.session or "", None)
        if turn is None:
            return
        self.window.observe_pause(turn.tokens, turn.pause_s, self.agents.break_even_s, now)
        if turn.kept:
            self.window.observe(turn.tokens, turn.lost, now)

    def on_finished(self, outcome: Outcome, now: float) -> None:
        self.window.observe_lost(self.agents.finished(outcome, now), now)

    def on_freed(self, request: str, now: float) -> None:
        self.agents.freed(request, now)

    # admission

    def admits(self, request: RouteRequest, now: float) -> bool:
        agent = self.agents.of(request)
        if agent is None or (agent.active and not agent.leaving):
            return True
        if self.window.open:
            self._admit(request, agent, agent.rank, now)
            return True
        self._review(now)
        first = self._takes_along(request, agent)
        if first:
            self._admit(request, agent, agent.rank, now)
            agent.along = first
            return True
        if agent.waiting_since is None:
            agent.waiting_since = now
            self.waiting[request.hints.session or ""] = agent
            agent.tokens += max(request.tokens - agent.context, 0)
            agent.context = max(agent.context, request.tokens)
        ends = now + request.deadline_s - min(MARGIN_S, request.deadline_s / 2)
        agent.rest_ends = min(agent.rest_ends, ends)
        reason, rank = self._place_for(agent, now)
        if reason is None:
            return False
        if now > agent.waiting_since:
            self.rests[reason] += 1
        self._admit(request, agent, rank, now)
        agent.overdue = reason == "deadline" and len(self._owned) < 2
        return True

    def queue_boost_s(self, request: RouteRequest) -> float:
        """Infinite after a rest until the deadline, if no other owner has agents: no queue."""
        agent = self.agents.find(request.hints.session)
        return inf if agent is not None and agent.overdue else 0.0

    def _takes_along(self, request: RouteRequest, agent: AgentState) -> str:
        """The session that takes a subagent along, which then has a place as well; empty if none.

        Its parent is active and waits for it, without a request of its own. MAX_SUBAGENTS go along
        with one agent, those of its subagents included, and beside other owners none beyond the
        share of their own: callers name their parents.
        """
        named = request.hints.parent_session or ""
        parent = self.agents.find(named)
        if parent is None or not parent.active or parent.running or parent.owner != agent.owner:
            return ""
        if len({*self._owned, agent.owner}) > 1 and not self._is_fair(agent):
            return ""
        named = parent.along or named
        first = self.agents.find(named)
        if first is None or self.agents.active_subagents(first) >= MAX_SUBAGENTS:
            return ""
        first.subagents.add(request.hints.session or "")
        return named

    def _place_for(self, agent: AgentState, now: float) -> tuple[str | None, RankId | None]:
        """The reason for which an agent may be active now, and its rank; None while it rests.

        A context beyond the limit of every rank fits where no other agent is active.
        """
        limits, tokens = self._limits, agent.tokens
        fits = {r: free for r, free in self._free.items() if free >= min(tokens, limits[r])}
        if fits:
            own = agent.rank is not None and agent.rank in fits
            return "room", agent.rank if own else min(fits, key=lambda rank: fits[rank])
        if not self._free:
            return "room", None
        if now >= agent.rest_ends:
            return "deadline", None
        return ("share" if self._is_fair(agent) else None), None

    def _is_fair(self, agent: AgentState) -> bool:
        """True if its owner may have this agent, too, whatever the others have.

        One of several owners may have one agent of any size: it would rest for those of others
        until its deadline.
        """
        owned, share = self._owned.get(agent.owner, 0.0), self._fair_share(agent.owner)
        return owned + agent.tokens <= share or (owned <= 0.0 < share)

    def _fair_share(self, owner: str) -> float:
        """The tokens that an owner's active agents may have whatever the others have."""
        owners = {*self._owned, owner}
        if len(owners) < 2:
            return 0.0
        return sum(self._limits.values()) / len(owners)

    def _admit(
        self, request: RouteRequest, agent: AgentState, rank: RankId | None, now: float
    ) -> None:
        agent.waited_s = agent.rested_s(now)
        self.waiting.pop(request.hints.session or "", None)
        agent.active, agent.leaving, agent.admitted, agent.along = True, False, True, ""
        agent.active_since = agent.ended = now
        agent.waiting_since, agent.rest_ends = None, inf
        if rank is None:
            agent.rank = None
        else:
            self.agents.move(agent, rank)
            if rank in self._free:
                self._free[rank] -= agent.tokens
        self._owned[agent.owner] = self._owned.get(agent.owner, 0.0) + agent.tokens

    # review

    def tick(self, now: float) -> None:
        self.agents.update_break_even()
        self.agents.drop_gone(now)
        self._forget_waiting(now)
        if self.agents.break_even_s < LEAST_BREAK_EVEN_S or not self.window.pays:
            self.window.share = inf
        else:
            self.window.review(bool(self.waiting), self.agents.prefill_rate, now)
        if self.window.open:
            return
        self._review(now, True)
        self._shrink(now)
        self._rotate(now)

    def _forget_waiting(self, now: float) -> None:
        """Forget agents that wait no more: their requests were withdrawn or refused."""
        for session, agent in list(self.waiting.items()):
            if now > agent.rest_ends + MARGIN_S or self.agents.find(session) is not agent:
                agent.waiting_since, agent.rest_ends = None, inf
                del self.waiting[session]

    def _review(self, now: float, always: bool = False) -> None:
        """Measure the free memory of each rank, and the tokens of each owner's active agents."""
        if now - self._reviewed < REVIEW_S and not always:
            return
        self._reviewed = now
        share = self.window.share
        self._limits = {rank: share * each for rank, each in self.agents.capacities().items()}
        free = dict(self._limits)
        owned: defaultdict[str, float] = defaultdict(float)
        for session, agent in self.agents:
            if agent.active:
                tokens = agent.tokens * self.agents.presence(session, agent, now)
                owned[agent.owner] += tokens
                if agent.rank in free:
                    free[agent.rank] -= tokens
        waiting = {agent.owner: 0.0 for agent in self.waiting.values()}
        self._free, self._owned = free, waiting | owned

    def _shrink(self, now: float) -> None:
        """Have agents of each rank rest until their contexts fit its limit."""
        excess = {rank: -free for rank, free in self._free.items() if free < 0.0}
        if not excess:
            return
        for _, agent in self.agents:
            if agent.active and agent.leaving and agent.rank in excess:
                excess[agent.rank] -= agent.tokens
        for session, agent in self._candidates(now):
            if agent.rank is not None and excess.get(agent.rank, 0.0) > 0.0:
                presence = self.agents.presence(session, agent, now)
                excess[agent.rank] -= agent.tokens * presence
                self.agents.rest(agent)

    def _rotate(self, now: float) -> None:
        """Have an agent leave for each one whose rest ends soon."""
        due = sum(1 for agent in self.waiting.values() if self._ends_soon(agent, now))
        due -= sum(1 for _, agent in self.agents if agent.active and agent.leaving)
        if due <= 0:
            return
        since = now - QUANTA * self.agents.break_even_s
        old = [agent for _, agent in self._candidates(now) if agent.active_since < since]
        for agent in old[:due]:
            self.agents.rest(agent)

    def _ends_soon(self, agent: AgentState, now: float) -> bool:
        return agent.waiting_since is not None and now >= agent.rest_ends - LEAD_S

    def _candidates(self, now: float) -> list[tuple[str, AgentState]]:
        """Active agents that may rest, the first one first: whose tool will run for longest.

        Then those with requests, the smallest context first. Agents of owners within their fair
        share stay. Reports on tools decide which agents of a tenant take the positions that it has
        by what was learned.
        """
        agents = self.agents
        over = {o for o, tokens in self._owned.items() if tokens > self._fair_share(o)}
        found = [
            RestCandidate(session, agent, agents.expected_soon(session, agent, now))
            for session, agent in agents
            if agent.active and not agent.leaving and not agent.admitted and agent.owner in over
        ]
        found.sort(key=_as_learned)
        of_tenant: defaultdict[str, deque[RestCandidate]] = defaultdict(deque)
        for each in sorted(found, key=_as_reported):
            of_tenant[each.agent.tenant].append(each)
        resting = [of_tenant[each.agent.tenant].popleft() for each in found]
        return [(each.session, each.agent) for each in resting]


def _as_learned(candidate: RestCandidate) -> tuple[bool, float, float]:
    agent = candidate.agent
    return bool(agent.running), candidate.back.learned, agent.tokens


def _as_reported(candidate: RestCandidate) -> tuple[bool, float, float]:
    agent, back = candidate.agent, candidate.back
    return (
        bool(agent.running),
        back.learned if back.reported is None else back.reported,
        agent.tokens,
    )
