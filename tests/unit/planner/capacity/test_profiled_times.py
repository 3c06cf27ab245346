"""A profile gives step times before any sample, and yields to a fit once that predicts better."""

import numpy as np
import pytest
from msgspec.structs import replace
from support.planned_model import BLOCK, TIMES, LinearEngine

from kvmesh.planner.capacity.profiled_times import KnownTimes, ProfiledTimes, choose_times
from kvmesh.planner.capacity.step_times import FittedStepTimes, StepTimesFit
from kvmesh.step_times.profile import StepProfile


def profile(scale: float = 1.0, of: FittedStepTimes = TIMES) -> StepProfile:
    """The profile of a linear engine, with all times off by `scale`."""
    prompts, active = np.array([1.0, 16_384.0]), np.array([1.0, 400_000.0])
    return StepProfile(
        {
            "prefill_isl": prompts,
            "prefill_ttft_ms": scale * 1000 * (of.prefill_step + of.token * prompts),
            "decode_active_kv_tokens": active,
            "decode_context_length": np.array([1.0, 10_000.0]),
            "decode_itl": scale * 1000 * np.tile((of.step + of.kv_token * active)[:, None], 2),
        }
    )


def collected(loads: int, **fixed: int) -> StepTimesFit:
    fit, engine = StepTimesFit(BLOCK, 8192, 400_000), LinearEngine("w")
    for _ in range(loads + 1):
        fit.add(engine.load(**fixed))
    return fit


def errors(known: KnownTimes) -> tuple[float, float]:
    """Relative errors of a full prefill and of a decode with half of the memory."""
    prefill = known.times.prefill(8192) / TIMES.prefill(8192)
    decode = known.times.decode(32, 200_000) / TIMES.decode(32, 200_000)
    return abs(prefill - 1), abs(decode - 1)


def test_without_samples_the_profile_holds() -> None:
    known = choose_times(profile(), None)
    assert (known.source, known.factor) == ("profile", 1.0)
    assert max(errors(known)) < 1e-6
    assert known.times.prefill(0) == known.times.decode(0, 0.0) == 0.0


def test_a_profile_that_is_off_is_scaled_by_a_few_samples() -> None:
    known = choose_times(profile(1 / 1.3), collected(6))
    assert known.source == "profile"
    assert known.factor == pytest.approx(1.3, rel=0.05)
    assert max(errors(known)) < 0.1
    assert max(errors(choose_times(profile(1 / 1.3), collected(200)))) < 0.1


def test_collinear_samples_scale_the_profile() -> None:
    """Steps of one batch only: a fit cannot tell prefill from decode, the profile can."""
    fit, steps, busy = StepTimesFit(BLOCK, 8192, 400_000), 0, 0.0
    template = LinearEngine("w").load(running=4, decode_tokens=100_000)
    for _ in range(60):
        steps += 10
        busy += 10 * (TIMES.prefill(512) + TIMES.decode(4, 100_000))
        counters = {"steps": steps, "prefill_steps": steps, "computed_tokens": 512 * steps}
        fit.add(replace(template, busy_s=busy, **counters))
    alone = fit.fitted()
    assert alone is not None
    known = choose_times(profile(1 / 1.3), fit)
    assert known.source == "profile"
    assert max(errors(known)) < 0.02 < max(errors(KnownTimes(alone, "fit")))


def test_varied_samples_replace_a_profile_of_another_shape() -> None:
    other = FittedStepTimes(step=0.005, prefill_step=0.05, token=1e-4, kv_token=4e-7)
    fit = collected(400)
    known = choose_times(profile(of=other), fit)
    assert known.source == "fit"
    assert max(errors(known)) < 0.15 < max(errors(choose_times(profile(of=other), None)))


def test_a_choice_is_kept_until_samples_are_new() -> None:
    chosen, fit, of = ProfiledTimes(), collected(40), profile(0.5)
    first = chosen.known(of, fit)
    assert chosen.known(of, fit) is first
    assert chosen.known(profile(0.5), fit) is not first
