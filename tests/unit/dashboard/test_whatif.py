"""A question “What if”: checks, figures, commands, and one comparison at a time."""

import asyncio
import shlex
from typing import Any

import pytest
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.dashboard import comparisons
from kvmesh.dashboard.comparisons import MOST_WAITING, ComparisonError, Comparisons, Report
from kvmesh.dashboard.state.whatif import (
    MOST_BLOCKS,
    MOST_WORKERS,
    Compared,
    WhatIf,
    adoption,
    busiest_first,
    command_lines,
    fidelity,
    figure_rows,
    problem,
    span_text,
)
from kvmesh.settings import Settings
from kvmesh.simulator.whatif.comparison import WhatIfAnswer
from kvmesh.simulator.whatif.runs import ComparedRun, WorkerShare
from kvmesh.workload.replay.summary import spread

ASKED = WhatIf(model="m", since=1000.0, until=1300.0, policy="session")
DAY = 86400.0


def run(policy: str, ttft: float, cached: float = 0.5) -> ComparedRun:
    return ComparedRun(
        policy=policy,
        requests=10,
        failed=0,
        cached_share=cached,
        ttft_s=spread([ttft]),
        inter_token_s=None,
        queue_s=spread([0.0]),
        workers=[
            WorkerShare(name=name, requests=5, prompt_tokens=tokens, cached_share=0.5)
            for name, tokens in (("w-0", 100), ("w-1", 300))
        ],
        ttft_curve=[],
        cached_curve=[],
    )


def compared(asked: WhatIf = ASKED, cut: bool = False) -> Compared:
    found = WhatIfAnswer(
        first=1001.0,
        last=1299.0,
        measured=run("kv", 0.1),
        present=run("kv", 0.2),
        chosen=run(asked.policy or "kv", 0.1, cached=0.6),
        present_fleet="2 × 10 blocks",
        chosen_fleet="2 × 10 blocks",
    )
    return Compared(asked, found, 10, cut)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"policy": ""}, ""),
        ({"model": ""}, "Choose a model"),
        ({"policy": "os:system"}, "No policy is named os:system"),
        ({"until": 1000.0}, "must end after"),
        ({"since": 2001.0, "until": 2002.0}, "future"),
        ({"since": -2 * DAY, "until": -1.5 * DAY}, "keeps requests for 1d00h"),
        ({"workers": MOST_WORKERS + 1}, "number of workers"),
        ({"blocks": MOST_BLOCKS + 1}, "number of blocks"),
        ({"blocks": -1}, "number of blocks"),
        ({"speedup": 0.0}, "speed"),
    ],
)
def test_a_question_is_checked(changes: dict[str, Any], reason: str) -> None:
    asked = WhatIf(**{**vars(ASKED), **changes})
    found = problem(asked, {"kv", "session"}, 2000.0, DAY)
    assert reason in found
    assert bool(reason) is bool(found)


def test_figures_stand_side_by_side() -> None:
    head, *rows = figure_rows(compared().comparison)
    assert head[1:4] == ["measured (kv)", "present, simulated (kv)", "chosen, simulated (session)"]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["TTFT p50"] == ["100.0 ms", "200.0 ms", "100.0 ms", "-50.0%"]
    assert cells["ITL p99"] == ["–", "–", "–", "–"]
    assert cells["cached share of prompt tokens"] == ["50.0%", "50.0%", "60.0%", "+10.0 points"]
    assert cells["queue wait p50"][-1] == "="
    assert cells["busiest worker over the mean, computed tokens"][0] == "1.50"
    assert busiest_first(compared().comparison.present) == [150, 50]
    assert fidelity(compared().comparison).endswith("cached share +0.0 points, TTFT p50 ×2.00.")


def test_a_cut_capture_is_said() -> None:
    assert "Cut" not in span_text(compared())
    assert "only the first 10" in span_text(compared(cut=True))


def test_one_command_shows_the_same_in_a_terminal() -> None:
    [line] = command_lines(compared(), Settings())
    assert shlex.split(line) == [
        *("kvmesh", "simulate", "live", "--model", "m"),
        *("--since", "1970-01-01T00:16:40.000+00:00"),
        *("--until", "1970-01-01T00:21:40.000+00:00"),
        *("--policy", "kv,session"),
    ]


def test_another_fleet_needs_a_command_of_its_own() -> None:
    asked = WhatIf(model="m", since=1000.0, until=1300.0, workers=3, blocks=64, speedup=5.0)
    settings = Settings()
    nats = replace(settings.nats, url="nats://user:secret@host:4222", namespace="blue")
    present, chosen = command_lines(compared(asked, cut=True), replace(settings, nats=nats))
    assert "--workers" not in present
    assert "--workers 3 --mock-blocks 64 --policy kv" in chosen
    for line in (present, chosen):
        assert "secret" not in line
        assert "--nats-namespace blue" in line
        assert "--limit 10" in line
        assert "--mock-speedup 5" in line


def test_the_settings_to_change_are_named() -> None:
    [policy] = adoption(compared())
    assert "router.policy to session" in policy
    fleet, caches = adoption(compared(WhatIf("m", 1000.0, 1300.0, workers=3, blocks=64)))
    assert "run 3 workers" in fleet
    assert "64 KV blocks" in caches


def noting(steps: list[str]) -> Report:
    return lambda step, share: steps.append(step)


async def test_one_comparison_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[asyncio.Event] = []

    async def read(*arguments: object) -> None:
        reads.append(asyncio.Event())
        await reads[-1].wait()

    monkeypatch.setattr(comparisons, "read_routes", read)
    both = Comparisons(object.__new__(Bus), Settings())
    steps: list[list[str]] = [[] for _ in range(MOST_WAITING + 1)]
    tasks = [asyncio.create_task(both.compare(ASKED, [], noting(own))) for own in steps]
    await asyncio.sleep(0)
    assert len(reads) == 1
    assert steps[1] == ["Waiting for the comparison of another page."]
    with pytest.raises(ComparisonError, match="try again later"):
        await both.compare(ASKED, [], lambda step, share: None)
    tasks[1].cancel()  # its page was closed while it waited
    tasks[0].cancel()
    await asyncio.wait(tasks[:2])
    await asyncio.sleep(0)
    assert len(reads) == 2
    assert steps[2][-1] == "Reading the requests of this time."
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
