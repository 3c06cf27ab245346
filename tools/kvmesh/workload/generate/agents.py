"""The agent generator: draws closed-loop sessions from a profile."""

import heapq
import random
from dataclasses import dataclass, field

from kvmesh.retention.hints import seconds
from kvmesh.workload.generate.distributions import draw, draw_int
from kvmesh.workload.generate.profile import (
    Agent,
    AgentProfile,
    AgentProfileError,
    Spawn,
    ToolCalls,
)
from kvmesh.workload.model import HUMAN, Round, Session, Workload
from kvmesh.workload.tree import Tree

TOKEN_S, REQUEST_S = 0.02, 0.5


@dataclass
class RoundDraft:
    """A round before its index is known, with an estimated start; `after` holds drafts."""

    session: int
    branch: int
    output_branch: int
    tokens: int
    output: int
    wait_s: float
    after: "list[RoundDraft]"
    start_s: float
    agent: Agent
    wait: str = ""
    wait_class: str = ""
    approval_s: float = 0.0
    base_tokens: int = 0
    abort_after: int | None = None
    rendered: tuple[int, int] | None = None
    index: int = -1

    @property
    def end_s(self) -> float:
        output = self.output if self.abort_after is None else self.abort_after
        return self.start_s + REQUEST_S + TOKEN_S * output


@dataclass
class SessionState:
    """Generation state of a session: its prompt so far and the drafts its next round waits for."""

    agent: Agent
    session: int
    base: int
    base_tokens: int
    branch: int
    tokens: int
    ready_s: float
    wait_s: float
    wait: str
    after: list[RoundDraft]
    compacts: bool
    wait_class: str = ""
    approval_s: float = 0.0
    step: int = 0
    turn_tokens: int = 0  # of the prompt at the start of the turn, or of its summary
    turn_thinking: int = 0  # tokens that the prompt contains until the turn ends
    last: list[RoundDraft] = field(default_factory=list)


class AgentGenerator:
    """Generates one workload, determined by profile and seed."""

    def __init__(self, profile: AgentProfile, seed: int = 0) -> None:
        self._profile = profile
        self._rng = random.Random(seed)
        self._ends_rng = random.Random(f"{seed} ends")
        self._agents = {agent.name: agent for agent in profile.agents}
        self._tree = Tree()
        self._sessions: list[Session] = []
        self._drafts: list[RoundDraft] = []
        self._prompts: dict[tuple[str, int], tuple[int, int]] = {}

    def workload(self, sessions: int | None = None) -> Workload:
        """Generate `sessions` sessions (default: the profile's number) and their children.

        Raises AgentProfileError if no session has a request.
        """
        roots = [agent for agent in self._profile.agents if agent.share]
        weights = [agent.share for agent in roots]
        clock, slots = 0.0, self._profile.concurrency
        ends: list[tuple[float, int, list[RoundDraft]]] = []
        for number in range(sessions or self._profile.sessions):
            agent = self._rng.choices(roots, weights)[0]
            if slots is None or number < slots:
                ready, before = clock, list[RoundDraft]()
            else:
                ready, _, before = heapq.heappop(ends)
            wait = 0.0 if before else ready
            last = self._session(agent, None, before, wait, ready) or before
            end = max((draft.end_s for draft in last), default=ready)
            heapq.heappush(ends, (end, number, last))
            clock += self._rng.expovariate(self._profile.per_minute / 60)
        if not self._drafts:
            raise AgentProfileError("no requests: every first prompt exceeds its agent's context")
        return self._assemble()

    def _session(
        self,
        agent: Agent,
        parent: int | None,
        after: list[RoundDraft],
        wait_s: float,
        ready_s: float,
    ) -> list[RoundDraft]:
        """Generate a session with its children; return its last round (at most one)."""
        session = len(self._sessions)
        name = f"{agent.name}-{session}"
        ends = self._ends_rng.random() < agent.ends
        self._sessions.append(Session(name=name, kind=agent.name, parent=parent, ends=ends))
        base, base_tokens = self._prompt(agent)
        state = SessionState(
            agent=agent,
            session=session,
            base=base,
            base_tokens=base_tokens,
            branch=self._tree.fork(base, base_tokens),
            tokens=base_tokens + draw_int(agent.task, self._rng, 1),
            ready_s=ready_s,
            wait_s=wait_s,
            wait="",
            after=after,
            compacts=agent.compaction is not None and self._rng.random() < agent.compaction.share,
        )
        for turn in range(draw_int(agent.human.turns, self._rng, 1)):
            if turn:
                self._add_message(state)
            if not self._run_turn(state):
                break
        return state.last

    def _prompt(self, agent: Agent) -> tuple[int, int]:
        """Branch and length of the prefix that an agent's prompts share."""
        variant = self._rng.randrange(agent.prompt_variants)
        key = (agent.prompt, variant)
        if key not in self._prompts:
            tokens = draw_int(agent.prompt_tokens, self._rng, 1)
            self._prompts[key] = (self._tree.fork(), tokens)
        return self._prompts[key]

    def _add_message(self, state: SessionState) -> None:
        state.tokens += draw_int(state.agent.human.message, self._rng, 1)
        state.wait_s = draw(state.agent.human.wait_s, self._rng)
        state.wait, state.wait_class, state.approval_s = HUMAN, "", 0.0

    def _run_turn(self, state: SessionState) -> bool:
        """Generate the steps of one turn; False if the prompt has outgrown the context."""
        state.turn_tokens, state.turn_thinking = state.tokens, 0
        for remaining in reversed(range(draw_int(state.agent.steps, self._rng, 1))):
            if state.tokens > _limit(state) and not self._compact(state):
                return False
            draft = self._step(state, not remaining)
            if draft.abort_after is not None:
                break
            if remaining:
                self._use_tool(state)
            self._spawn(state, draft)
        if state.turn_thinking:
            self._drop_thinking(state)
        return True

    def _drop_thinking(self, state: SessionState) -> None:
        """Leave the thinking of the turn out of all later prompts."""
        state.branch = self._tree.fork(state.branch, state.turn_tokens)
        state.tokens -= state.turn_thinking
        for draft in state.last:
            draft.rendered = state.branch, state.tokens

    def _step(self, state: SessionState, ends_turn: bool) -> RoundDraft:
        agent = state.agent
        output = draw_int(agent.output, self._rng, 1)
        thinking = 0 if agent.keep_thinking is True else round(output * agent.thinking)
        abort = None
        if self._rng.random() < agent.abort:
            abort = self._rng.randint(1, output)
        dropped = thinking > 0 and (ends_turn or abort is not None or not agent.keep_thinking)
        draft = self._write(state, output, dropped, abort)
        generated = output if abort is None else abort
        thinking = min(thinking, generated)
        if agent.keep_thinking == "turn":
            state.turn_thinking += thinking
            thinking = 0
        state.tokens += generated - thinking
        state.step += 1
        return draft

    def _write(
        self, state: SessionState, output: int, private: bool, abort: int | None = None
    ) -> RoundDraft:
        """Append a round to the session; later prompts do not contain `private` outputs."""
        output_branch = self._tree.fork(state.branch, state.tokens) if private else state.branch
        draft = RoundDraft(
            session=state.session,
            branch=state.branch,
            output_branch=output_branch,
            tokens=state.tokens,
            output=output,
            wait_s=state.wait_s,
            after=state.after,
            start_s=state.ready_s + (state.wait_s if state.after else 0.0),
            agent=state.agent,
            wait=state.wait,
            wait_class=state.wait_class,
            approval_s=state.approval_s,
            base_tokens=state.base_tokens,
            abort_after=abort,
        )
        self._drafts.append(draft)
        state.after = state.last = [draft]
        state.ready_s, state.wait_s, state.wait = draft.end_s, 0.0, ""
        state.wait_class, state.approval_s = "", 0.0
        return draft

    def _use_tool(self, state: SessionState) -> None:
        tools = state.agent.tools
        if not tools:
            state.tokens += draw_int(state.agent.result, self._rng)
            return
        tool = self._rng.choices(tools, [tool.weight for tool in tools])[0]
        calls: ToolCalls = tool
        if tool.classes:
            weights = [calls.weight for calls in tool.classes]
            calls = self._rng.choices(tool.classes, weights)[0]
            state.wait_class = calls.name
        results = (calls.result, tool.result, state.agent.result)
        result = next(each for each in results if each is not None)
        state.tokens += draw_int(result, self._rng)
        assert calls.wait_s is not None
        state.wait_s = draw(calls.wait_s, self._rng)
        state.wait = tool.name
        approval = max(tool.approval, calls.approval)
        if approval and self._rng.random() < approval:
            state.approval_s = draw(state.agent.human.approval_s, self._rng)
            state.wait_s += state.approval_s

    def _compact(self, state: SessionState) -> bool:
        """Continue from a summary of the prompt; False if the session does not compact."""
        compaction = state.agent.compaction
        if compaction is None or not state.compacts:
            return False
        self._write(state, draw_int(compaction.summary, self._rng, 1), private=True)
        state.branch = self._tree.fork(state.base, state.base_tokens)
        state.tokens = max(state.base_tokens + 1, draw_int(compaction.to, self._rng))
        state.turn_tokens, state.turn_thinking = state.tokens, 0
        return True

    def _spawn(self, state: SessionState, draft: RoundDraft) -> None:
        for spawn in state.agent.spawns:
            if not self._due(spawn, state.step):
                continue
            child = self._agents[spawn.agent]
            for _ in range(draw_int(spawn.count, self._rng, 1)):
                last = self._session(child, state.session, [draft], 0.0, draft.end_s)
                state.after = [*state.after, *last]
                state.ready_s = max(state.ready_s, *(d.end_s for d in last))

    def _due(self, spawn: Spawn, step: int) -> bool:
        return step == spawn.step or (spawn.chance > 0 and self._rng.random() < spawn.chance)

    def _assemble(self) -> Workload:
        """Number the drafts by their estimated start and turn them into rounds."""
        self._drafts.sort(key=lambda draft: draft.start_s)
        for index, draft in enumerate(self._drafts):
            draft.index = index
        return Workload(
            tree=self._tree,
            sessions=self._sessions,
            rounds=[_round(draft) for draft in self._drafts],
        )


def _limit(state: SessionState) -> int:
    agent = state.agent
    if agent.compaction is None or not state.compacts:
        return agent.context
    return min(agent.context, agent.compaction.at)


def _round(draft: RoundDraft) -> Round:
    return Round(
        session=draft.session,
        branch=draft.branch,
        output_branch=draft.output_branch,
        input_tokens=draft.tokens,
        output_tokens=draft.output,
        at_s=draft.wait_s,
        after=tuple(sorted(before.index for before in draft.after)),
        wait=draft.wait,
        wait_class=draft.wait_class,
        approval_s=draft.approval_s,
        marks=_marks(draft),
        osl=draft.agent.osl or 0,
        priority=draft.agent.priority,
        thinking_tokens=round(draft.output * draft.agent.thinking),
        rendered=draft.rendered,
        abort_after=draft.abort_after,
    )


def _marks(draft: RoundDraft) -> tuple[tuple[int, float], ...]:
    """The cache marks of a prompt: (tokens, seconds)."""
    marks = draft.agent.marks
    given = ((draft.base_tokens, marks.prompt), (draft.tokens, marks.last))
    return tuple((tokens, seconds(ttl)) for tokens, ttl in given if ttl is not None)
