"""Isolation: the times at which suspects are tried on an engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.frontend.dispatch import isolation
from kvmesh.frontend.dispatch.isolation import Isolation
from kvmesh.frontend.dispatch.suspects import Suspects


def suspect(suspects: Suspects, name: str) -> Any:
    suspects.lost(name, "a", 0, reported=False)
    return SimpleNamespace(id=name, fresh=0)


async def test_no_trial_starts_while_workers_are_lost_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(isolation, "CALM_S", 0.2)
    suspects, lost = Suspects(), [loop.time()]
    trials = Isolation(suspects, lambda: lost[-1])
    entering = [asyncio.create_task(trials.enter(suspect(suspects, name))) for name in "xy"]
    for _ in range(3):
        done, _ = await asyncio.wait(entering, timeout=0.1)
        assert not done
        lost.append(loop.time())
    await asyncio.wait(entering, return_when=asyncio.FIRST_COMPLETED)
    assert loop.time() >= lost[-1] + 0.2
    for task in entering:
        task.cancel()


async def test_endless_losses_of_workers_delay_a_trial_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(isolation, "MAX_CALM_S", 0.3)
    suspects = Suspects()
    trials = Isolation(suspects, loop.time)
    await trials.enter(suspect(suspects, "x"))


async def test_the_next_suspect_is_tried_once_the_last_has_a_token() -> None:
    suspects = Suspects()
    trials = Isolation(suspects, lambda: -1e9)
    first, second = suspect(suspects, "x"), suspect(suspects, "y")
    await trials.enter(first)
    entering = asyncio.create_task(trials.enter(second))
    done, _ = await asyncio.wait([entering], timeout=0.1)
    assert not done
    first.fresh = 1
    await entering
    suspects.forget("y")
