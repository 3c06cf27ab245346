"""Agents of a model: which are active, and the memory that their contexts need on each rank."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, inf
from typing import NamedTuple

from kvmesh.bus.messages import Decision, Outcome, RouteRequest, session_owner
from kvmesh.hashing import HASH_BYTES
from kvmesh.returns.forecaster import ReturnChance
from kvmesh.router.policies.base import Returns
from kvmesh.router.state.fair_classes import fair_class, main_class
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.router.state.rank_table import RankTable

MAX_AGENTS = 16_384
MAX_REQUESTS = 32_768
MAX_ID_LENGTH = 256
BREAK_EVEN_S = 10.0  # while no speed of an engine is known
SHORTEST_S, LONGEST_S = 0.05, 30.0
RESERVED_S = 60.0  # for an admitted request to be placed
GONE = 0.2  # weight below which an agent without a request has left
CERTAIN = ReturnChance(1.0, None)
UNKNOWN = ReturnChance(0.5, None)

RankId = tuple[str, int]


@dataclass(slots=True, eq=False)
class AgentState:
    """One session, of a tenant or fair class, its `owner`; `tenant` is that of both.

    `rank` holds its context; `tokens` leave out what other agents there share. `turn` is the packed
    hash of the last full block of its latest prompt, of `blocks` blocks. An active agent that is
    `leaving` rests once its requests have ended. `admitted` is a reservation for a request that is
    not placed yet, `overdue` if only its deadline ended the rest. `subagents` are the sessions that
    were admitted along with it, each `along` with its session.
    """

    owner: str
    tokens: float
    context: int
    rank: RankId | None = None
    prefix: tuple[int, PrefixNode] | None = None
    running: set[str] = field(default_factory=set)
    ended: float = 0.0
    active: bool = False
    active_since: float = -inf
    leaving: bool = False
    admitted: bool = False
    overdue: bool = False
    along: str = ""
    subagents: set[str] = field(default_factory=set)
    waiting_since: float | None = None
    waited_s: float = 0.0
    rest_ends: float = inf
    turn: bytes = b""
    blocks: int = 0
    tenant: str = ""

    def rested_s(self, now: float) -> float:
        """Seconds for which its request has waited for a place."""
        return 0.0 if self.waiting_since is None else max(now - self.waiting_since, 0.0)


class SeenTurn(NamedTuple):
    """A turn that continues the one before: its tokens, and those that were evicted since.

    `pause_s` is the time between the turns without waits in queues; `kept` if the agent had its
    place meanwhile.
    """

    tokens: int
    lost: int
    pause_s: float
    kept: bool


class PlacedTurn(NamedTuple):
    """A running request of an agent; `expected` are the tokens that its rank held, if it counts."""

    session: str
    expected: int


class ActiveAgents:
    """At most MAX_AGENTS agents; those unused for longest are forgotten. Times in seconds.

    `break_even_s` is the time in which a rank computes as many tokens as it holds: to keep a
    context for an agent that returns later costs more than to compute it again. While
    `several_tenants` have active agents, a report on a tool orders those of its own tenant and
    changes nothing else. `prefill_rate` are the prompt tokens that all ranks compute per second at
    most, 0 while unknown.
    """

    def __init__(self) -> None:
        self.table: RankTable | None = None
        self.returns: Returns | None = None
        self.speeds: RankSpeeds | None = None
        self.break_even_s = BREAK_EVEN_S
        self.several_tenants = False
        self.prefill_rate = 0.0
        self._agents: OrderedDict[str, AgentState] = OrderedDict()
        self._engaged: OrderedDict[str, AgentState] = OrderedDict()
        self._requests: OrderedDict[str, PlacedTurn] = OrderedDict()
        self._prefixes = PrefixTree()

    def __iter__(self) -> Iterator[tuple[str, AgentState]]:
        """All active agents, and those that wait, in the order of their use; perhaps others."""
        return iter(self._engaged.items())

    def __len__(self) -> int:
        return len(self._agents)

    def find(self, session: str | None) -> AgentState | None:
        return self._agents.get(session) if session else None

    def of(self, request: RouteRequest) -> AgentState | None:
        """The agent of a request, a new one if it is unknown; None without a usable session."""
        session = request.hints.session
        if not session or len(session) > MAX_ID_LENGTH:
            return None
        agent = self._agents.get(session)
        if agent is None:
            owner = main_class(fair_class(request.hints))
            agent = AgentState(owner, request.tokens, request.tokens)
        self._use(session, agent)
        return agent

    def active_subagents(self, agent: AgentState) -> int:
        """The number of active subagents that were admitted along with an agent."""
        active = [s for s in agent.subagents if (each := self.find(s)) is not None and each.active]
        agent.subagents = set(active)
        return len(active)

    def _use(self, session: str, agent: AgentState) -> None:
        """Note an agent, perhaps a new one, as the latest that was used."""
        if not agent.tenant:
            agent.tenant = f"{agent.owner}\x1f{session_owner(session)}"
        self._agents[session] = self._engaged[session] = agent
        self._agents.move_to_end(session)
        self._engaged.move_to_end(session)
        if len(self._agents) > MAX_AGENTS:
            oldest, unused = self._agents.popitem(last=False)
            self._engaged.pop(oldest, None)
            self.rest(unused)

    def placed(self, decision: Decision, all_admitted: bool, now: float) -> SeenTurn | None:
        """A request was placed: its agent is active. Returns its turn if that continues one.

        While `all_admitted`, an agent keeps its place for `break_even_s`.
        """
        session = decision.hints.session
        if not session or len(session) > MAX_ID_LENGTH or decision.prefetch is not None:
            return None
        agent = self._agents.get(session)
        if agent is None:
            agent = AgentState(main_class(fair_class(decision.hints)), 0.0, 0)
        self._use(session, agent)
        turn = None
        if decision.request not in agent.running:
            pause_s = max(now - decision.wait_s - agent.ended, 0.0)
            kept = (
                (agent.active or all_admitted)
                and not agent.waited_s
                and pause_s <= self.break_even_s
            )
            lost = self._continue(agent, decision)
            turn = None if lost is None else SeenTurn(decision.tokens, lost, pause_s, kept)
        if not agent.active:
            agent.active, agent.active_since = True, now
        self._count_context(agent, decision)
        agent.running.add(decision.request)
        agent.admitted = agent.overdue = False
        agent.waited_s = 0.0
        agent.waiting_since, agent.rest_ends = None, inf
        held = sum((decision.prefill or decision.chosen).overlap) * decision.block_size
        expected = held if turn is not None and turn.kept else 0
        self._requests.setdefault(decision.request, PlacedTurn(session, expected))
        if len(self._requests) > MAX_REQUESTS:
            self.freed(next(iter(self._requests)), now)
            self._requests.popitem(last=False)
        if decision.hints.session_final:
            agent.leaving = True
        return turn

    def _continue(self, agent: AgentState, decision: Decision) -> int | None:
        """Remember the prompt; returns its tokens that the latest one had, and no rank holds.

        None if it does not continue the latest one.
        """
        hashes, known = decision.sequence_hashes, agent.blocks
        count, at = len(hashes) // HASH_BYTES, HASH_BYTES * (known - 1)
        continues = 0 < known <= count and hashes[at : at + HASH_BYTES] == agent.turn
        agent.blocks, agent.turn = count, hashes[HASH_BYTES * (count - 1) :] if count else b""
        if not continues:
            return None
        held = sum(decision.chosen.overlap)
        held = max(held, max((sum(c.overlap) for c in decision.candidates), default=0))
        return max(known - held, 0) * decision.block_size

    def _count_context(self, agent: AgentState, decision: Decision) -> None:
        """Count the agent's context on the rank of the decision."""
        self._release(agent)
        agent.rank = decision.chosen.instance, decision.chosen.rank
        agent.context, agent.tokens = decision.tokens, float(decision.tokens)
        slot = self.table.find_slot(*agent.rank) if self.table is not None else None
        if slot is not None:
            end, new = self._prefixes.add(slot, decision.sequence_hashes)
            agent.prefix = slot, end
            shared = len(decision.sequence_hashes) // HASH_BYTES - new
            agent.tokens -= shared * decision.block_size

    def _release(self, agent: AgentState) -> None:
        if agent.prefix is not None:
            slot, end = agent.prefix
            self._prefixes.drop(end, slot)
            agent.prefix = None

    def finished(self, outcome: Outcome, now: float) -> int:
        """A request has ended; returns the tokens that its rank held then and evicted before it.

        The last block does not count: engines compute at least a part of it.
        """
        self.freed(outcome.request, now)
        turn = self._requests.pop(outcome.request, None)
        agent = self._agents.get(turn.session) if turn is not None else None
        if turn is None or agent is None:
            return 0
        agent.tokens += max(outcome.output_tokens, 0)
        agent.context += max(outcome.output_tokens, 0)
        size = self.table.block_size if self.table is not None else 0
        lost = turn.expected - outcome.cached_tokens - size
        return max(lost, 0) if outcome.output_tokens else 0

    def freed(self, request: str, now: float) -> None:
        """A request has ended or was given up; `finished` may follow."""
        turn = self._requests.get(request)
        agent = self._agents.get(turn.session) if turn is not None else None
        if agent is None or request not in agent.running:
            return
        agent.running.discard(request)
        agent.ended = now
        if agent.leaving:
            self.rest(agent)

    def move(self, agent: AgentState, rank: RankId) -> None:
        """Count an agent's context on another rank."""
        if agent.rank != rank:
            self._release(agent)
            agent.rank = rank

    def rest(self, agent: AgentState) -> None:
        """Take an agent's place: at once, or once its requests have ended."""
        if agent.running:
            agent.leaving = True
            return
        agent.active = agent.leaving = agent.admitted = False
        self._release(agent)

    def update_break_even(self) -> None:
        """Update `break_even_s` by the memory and the measured speed of the ranks."""
        rate = self.speeds.prefill_rate if self.speeds is not None else 0.0
        sizes = self.capacities().values()
        self.prefill_rate = rate * len(sizes)
        if rate > 0.0 and sizes:
            break_even_s = sum(sizes) / len(sizes) / rate
            self.break_even_s = min(max(break_even_s, SHORTEST_S), LONGEST_S)

    def drop_gone(self, now: float) -> None:
        """End the activity of agents whose tools run for long."""
        self._forget_resting()
        self._count_tenants()
        for session, agent in self._engaged.items():
            if not agent.active or agent.running:
                continue
            if agent.admitted and now - agent.active_since < RESERVED_S:
                continue
            if agent.admitted or self.presence(session, agent, now) < GONE:
                self.rest(agent)

    def _forget_resting(self) -> None:
        engaged = self._engaged
        for session in [s for s, a in engaged.items() if not a.active and a.waiting_since is None]:
            del engaged[session]

    def _count_tenants(self) -> None:
        self.several_tenants = len({agent.tenant for agent in self._engaged.values()}) > 1

    def presence(self, session: str, agent: AgentState, now: float) -> float:
        """Share of an active agent's context that counts.

        While no request runs, it fades over `break_even_s`, or follows the reported end of a tool.
        """
        if agent.running or agent.admitted:
            return 1.0
        if not self.several_tenants and self.returns is not None and self.returns.tools.known:
            reported = self._returns(session, now).reported
            if reported is not None:
                return reported
        return exp(-max(now - agent.ended, 0.0) / self.break_even_s)

    def expected_soon(self, session: str, agent: AgentState, now: float) -> ReturnChance:
        """The probability that an agent is back in `break_even_s`."""
        return CERTAIN if agent.running or agent.admitted else self._returns(session, now)

    def _returns(self, session: str, now: float) -> ReturnChance:
        if self.returns is None:
            return UNKNOWN
        return self.returns.within(session, self.break_even_s, now) or UNKNOWN

    def capacities(self) -> dict[RankId, float]:
        """The memory in tokens of each rank that decodes, where known."""
        table = self.table
        if table is None:
            return {}
        decode = {name for name, card in table.cards.items() if card.serves != "prefill"}
        return {
            key: float(table.total_blocks[slot]) * table.block_size
            for key, slot in table.slot_of.items()
            if key[0] in decode and table.total_blocks[slot]
        }
