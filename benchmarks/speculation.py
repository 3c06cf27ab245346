"""Speculative prefill of the prompts that follow answers of coding agents, in virtual time.

Coding agents call tools and talk to people, in closed loop, on two simulated engines. Each row is a
treatment of thinking, by the share of the answers that is thinking: the next prompts never contain
it ("never": the client drops it), or they do until a person writes again ("turn": the template
drops it, as many do). Then the whole turn is rendered anew, with the results of its tools.
"""

from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
from agentic_runs import Scene
from common import Report, median, parser

from kvmesh.frontend.sessions.speculation_gate import SpeculationMode
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import HUMAN, Workload

Kept = Literal["never", "turn"]
SCENE = Scene(1_500_000, (1.0, 1.0), speed=4.0)


@dataclass
class FollowUps:
    """A run: the tokens that prompts had to compute, and the times to their first tokens."""

    person_tokens: int
    tool_tokens: int
    person_ttft_s: float
    computed: int
    useful: int


def workload(kept: Kept, thinking: float, seed: int, sessions: int) -> Workload:
    """Coding agents whose sessions end with a request that is marked as the final one."""
    drawn = load_profile("coding-agents")
    keep: bool | Literal["turn"] = "turn" if kept == "turn" else False
    members = [
        msgspec.structs.replace(agent, ends=1.0, keep_thinking=keep, thinking=thinking)
        for agent in drawn.agents
    ]
    drawn = msgspec.structs.replace(drawn, per_minute=30.0, agents=members)
    return AgentGenerator(drawn, seed).workload(sessions)


def run(rounds: Workload, mode: SpeculationMode) -> FollowUps:
    options = SCENE.options(RouterSettings(policy="kv"), 0)
    simulation = Simulation(rounds, replace(options, speculative_prefill=mode))
    records = simulation.run()
    first, arrived = records.column("first_token"), records.column("arrived")
    tokens = {True: 0, False: 0}
    waits: list[float] = []
    for later in rounds.following():
        if later is None:
            continue
        person = rounds.rounds[later].wait == HUMAN
        tokens[person] += rounds.rounds[later].input_tokens - records.cached[later]
        if person:
            waits.append(float(first[later] - arrived[later]))
    ahead = simulation.speculation.record
    return FollowUps(
        person_tokens=tokens[True],
        tool_tokens=tokens[False],
        person_ttft_s=float(np.nanmedian(waits)),
        computed=ahead.computed_tokens,
        useful=ahead.useful_tokens,
    )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=5, metavar="N")
    arguments.add_argument("--sessions", type=int, default=40, metavar="N")
    chosen = arguments.parse_args()
    report = Report("Speculative prefill (virtual time)", "without it")
    kinds: tuple[Kept, ...] = ("turn", "never")
    for kept in kinds:
        for thinking in (0.4, 0.8):
            name = f"{kept}, {thinking:.0%} thinking"
            plain, ahead = list[FollowUps](), list[FollowUps]()
            for seed in range(chosen.seeds):
                rounds = workload(kept, thinking, seed, chosen.sessions)
                plain.append(run(rounds, "off"))
                ahead.append(run(rounds, "auto"))
            pairs = list(zip(plain, ahead, strict=True))
            goal = kept == "turn"
            report.add(
                f"{name}: tokens to compute after a person's message",
                median(100 * one.person_tokens / max(off.person_tokens, 1) for off, one in pairs),
                "%",
                "100",
                "≤ 65" if goal else "",
            )
            report.add(
                f"{name}: tokens to compute after tools",
                median(100 * one.tool_tokens / max(off.tool_tokens, 1) for off, one in pairs),
                "%",
                "100",
            )
            report.add(
                f"{name}: TTFT p50 after a person's message",
                median(1000 * one.person_ttft_s for one in ahead),
                "ms",
                f"{median(1000 * one.person_ttft_s for one in plain):.0f}",
            )
            report.add(
                f"{name}: computed ahead and not used",
                median(100 * (1 - one.useful / max(one.computed, 1)) for one in ahead),
                "%",
                "",
                "≤ 10",
            )
    report.finish("speculation: prompts after coding agents' answers", chosen.json)


if __name__ == "__main__":
    main()
