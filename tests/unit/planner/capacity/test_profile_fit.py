"""A profile fitted to samples of live steps is near the times, or refused with a reason."""

from random import Random

import numpy as np
import pytest

from kvmesh.planner.capacity.profile_fit import FittedProfile, ProfileFitError, fit_profile
from kvmesh.planner.capacity.step_times import StepSample
from kvmesh.step_times.profile import EngineLimits, StepProfile
from kvmesh.step_times.registry import load_step_profile

LIMITS = EngineLimits(8192, 256, 200_000)
TRUE = load_step_profile("h100x2-llama-3.3-70b-fp8")


def sample(tokens: int, prefills: int, decodes: int, kv: int, noise: float = 1.0) -> StepSample:
    seconds = decodes * TRUE.decode_seconds(8, kv) if decodes else 0.0
    seconds += prefills * TRUE.prefill(tokens) if prefills else 0.0
    return StepSample(decodes, prefills, prefills * tokens, decodes * kv, seconds * noise, 8)


def varied(count: int = 400, noise: float = 0.0, **fixed: int) -> list[StepSample]:
    rng = Random(4)
    found = []
    for _ in range(count):
        tokens = int(np.exp(rng.uniform(np.log(100), np.log(8192))))
        kv = rng.randrange(1000, 200_000)
        batch = {"tokens": tokens, "prefills": rng.randrange(2), "decodes": 4, "kv": kv} | fixed
        found.append(sample(**batch, noise=rng.gauss(1.0, noise)))
    return found


def fitted(samples: list[StepSample]) -> FittedProfile:
    return fit_profile([samples[n : n + 16] for n in range(0, len(samples), 16)], LIMITS)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.05, 0.08)])
def test_the_times_of_an_engine_with_bends_are_recovered(noise: float, tolerance: float) -> None:
    found = fitted(varied(noise=noise))
    profile = StepProfile(found.arrays)
    assert profile.limits == LIMITS
    for tokens in (400, 1000, 3000, 8000):
        assert profile.prefill(tokens) == pytest.approx(TRUE.prefill(tokens), rel=tolerance)
    for kv in (5000, 60_000, 180_000):
        assert profile.decode_seconds(8, kv) == pytest.approx(
            TRUE.decode_seconds(8, kv), rel=tolerance
        )
    assert found.median_error < max(noise, 0.01)
    assert found.samples == 400


def test_samples_far_off_do_not_bend_the_curve() -> None:
    samples = varied()
    odd = [s._replace(seconds=3 * s.seconds) if n % 20 == 0 else s for n, s in enumerate(samples)]
    profile = StepProfile(fitted(odd).arrays)
    assert profile.prefill(3000) == pytest.approx(TRUE.prefill(3000), rel=0.1)


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (varied(20), "20 samples of steps"),
        (varied(prefills=0), "only 0 samples have steps that compute prompts"),
        (varied(decodes=0), "only 0 samples have steps that decode"),
        (varied(tokens=512), "compute prompts have about 512 tokens"),
        (varied(kv=50_000), "decode have about 50,000 tokens"),
        (varied(noise=0.9, count=60), "do not tell the time of prefill from that of decode"),
    ],
)
def test_samples_that_do_not_tell_are_refused(samples: list[StepSample], reason: str) -> None:
    positive = [s._replace(seconds=abs(s.seconds)) for s in samples if s.seconds]
    with pytest.raises(ProfileFitError, match=reason):
        fitted(positive)
