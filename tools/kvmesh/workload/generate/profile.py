"""Agent profiles: the generator's distributions as a TOML file."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvmesh.retention.hints import Duration
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.generate.distributions import Amount, Quantiles
from kvmesh.workload.model import LIMIT, Priority

FOLDER = Path(__file__).with_name("profiles")
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=LIMIT)]
Weight = Annotated[float, Meta(ge=0, le=LIMIT)]


class AgentProfileError(WorkloadError):
    """A missing or invalid profile; the message names the file and the key."""


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class that rejects unknown keys by name."""


class ToolCalls(_Section, frozen=True, kw_only=True):
    """Calls of a tool: relative frequency, latency (s) and size of the result (tokens).

    A human has to approve a share of `approval` of them before they run.
    """

    name: str
    weight: Annotated[float, Meta(gt=0, le=LIMIT)]
    wait_s: Amount | None = None
    result: Amount | None = None
    approval: Share = 0.0


class ToolProfile(ToolCalls, frozen=True, kw_only=True):
    """A tool, whose calls differ by the class of their arguments if it has `classes`."""

    classes: list[ToolCalls] = []

    def __post_init__(self) -> None:
        for calls in self.classes or [self]:
            if calls.wait_s is None:
                raise ValueError(f"tool {calls.name!r} has no wait_s")


class Human(_Section, frozen=True, kw_only=True):
    """The user: turns per session, wait before each (s), tokens per message.

    `approval_s` is the time until a tool call is approved, in seconds.
    """

    turns: Amount = 1
    wait_s: Amount = Quantiles(p50=84, p90=1236, p99=50_000)
    message: Amount = 60
    approval_s: Amount = Quantiles(p50=20, p90=300, p99=3600)


class MarkedPrompts(_Section, frozen=True, kw_only=True):
    """Cache marks (`cache_control`) in each prompt, with their times to live such as "5m".

    `prompt` is after the system prompt with its tools, `last` after the last message.
    """

    prompt: Duration | None = None
    last: Duration | None = None


class Compaction(_Section, frozen=True, kw_only=True):
    """Compaction of prompts above `at` tokens: a summary becomes a new prompt of `to` tokens.

    `share` of the sessions compact; the others end at the agent's `context`.
    """

    at: Count
    to: Amount
    share: Share = 1.0
    summary: Amount = 2000


class Spawn(_Section, frozen=True, kw_only=True):
    """Child sessions: agent, number, and the step or the chance per step of spawning them.

    The parent continues once all of them have ended.
    """

    agent: str
    count: Amount = 1
    step: int | None = None
    chance: Share = 0.0


class Agent(_Section, frozen=True, kw_only=True):
    """One kind of agent.

    `share` is its weight among root sessions. Agents with the same `prompt` share its first
    `prompt_tokens` tokens, in `prompt_variants` versions. `thinking` is the share of the output
    that is reasoning. `keep_thinking` states whether later prompts contain it: all of them, none,
    or those before the next message of the human ("turn", as many chat templates do). Clients of a
    share of `ends` mark the final request of their session. With `osl`, they state with each
    request that they expect so many output tokens.
    """

    name: str
    share: Weight = 0.0
    prompt: str = "system"
    prompt_tokens: Amount = 16_000
    prompt_variants: Count = 1
    task: Amount = 1500
    steps: Amount
    output: Amount
    result: Amount = 0
    thinking: Share = 0.0
    keep_thinking: bool | Literal["turn"] = True
    abort: Share = 0.0
    ends: Share = 0.0
    marks: MarkedPrompts = MarkedPrompts()
    osl: Count | None = None
    priority: Priority = 0
    context: Count = 200_000
    human: Human = Human()
    tools: list[ToolProfile] = []
    compaction: Compaction | None = None
    spawns: list[Spawn] = []


class AgentProfile(_Section, frozen=True, kw_only=True):
    """A profile. Root sessions start as a Poisson process, `per_minute` on average.

    With `concurrency`, only the first `concurrency` sessions start so; each further session starts
    when another has ended.
    """

    description: str
    sessions: Count
    per_minute: Annotated[float, Meta(ge=1e-6, le=LIMIT)]
    concurrency: Count | None = None
    agents: Annotated[list[Agent], Meta(min_length=1)]

    def __post_init__(self) -> None:
        names = [agent.name for agent in self.agents]
        if len(set(names)) != len(names):
            raise ValueError("agent names must be unique")
        for agent in self.agents:
            for spawn in agent.spawns:
                if spawn.agent not in names:
                    raise ValueError(f"agent {agent.name!r} spawns unknown {spawn.agent!r}")
        if not any(agent.share for agent in self.agents):
            raise ValueError("no agent has a share")
        _reject_recursion(self.agents)


def _reject_recursion(agents: list[Agent]) -> None:
    """Raise ValueError if an agent can descend from itself."""
    children = {agent.name: {spawn.agent for spawn in agent.spawns} for agent in agents}
    for name in children:
        found: set[str] = set()
        stack = list(children[name])
        while stack:
            child = stack.pop()
            if child not in found:
                found.add(child)
                stack.extend(children[child])
        if name in found:
            raise ValueError(f"agent {name!r} spawns itself, directly or through others")


def builtin() -> dict[str, Path]:
    """Files of the shipped profiles by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.toml"))}


def load_profile(source: str) -> AgentProfile:
    """Load a shipped profile by name, or any by its path. Raises AgentProfileError."""
    file = builtin().get(source) or Path(source)
    try:
        return msgspec.toml.decode(file.read_bytes(), type=AgentProfile)
    except OSError as error:
        known = ", ".join(builtin())
        raise AgentProfileError(
            f"no profile {source!r} (shipped: {known}): {error.strerror}"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AgentProfileError(f"{file}: {str(error).replace('`$.', '`')}") from error
