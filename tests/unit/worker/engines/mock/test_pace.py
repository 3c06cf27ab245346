"""Engines of unlike and changing speed."""

from array import array
from dataclasses import replace

import pytest

from kvmesh.step_times.interface import DecodeLoad
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.enginecore.sequence import Request, hash_prompt
from kvmesh.worker.engines.mock.core import CoreOptions, MockCore
from kvmesh.worker.engines.mock.pace import WARM, Pace, PaceOptions
from kvmesh.worker.engines.mock.timing import PolynomialStepModel

OPTIONS = CoreOptions(blocks=100, limits=SchedulerLimits(block_size=16), emit_tokens=False)


class _Zeros:
    def slice(self, start: int, stop: int) -> list[int]:
        return [0] * (stop - start)


def seconds_of(options: CoreOptions, tokens: int, output: int) -> tuple[float, float]:
    """Seconds to the first token of a request, and from there to the last one."""
    core, now, first = MockCore(options), 0.0, 0.0
    local, sequence, tail = hash_prompt(array("I", range(tokens)).tobytes(), 16, 0)
    core.submit(
        Request(
            id="a",
            length=tokens,
            local_hashes=local,
            sequence_hashes=sequence,
            tail=tail,
            source=_Zeros(),
            target=output,
        )
    )
    while core.busy:
        result = core.step(now)
        now += result.duration
        first = first or now
    return first, now - first


def test_prompts_and_output_are_slowed_apart() -> None:
    prefill, decode = seconds_of(OPTIONS, 160, 5)
    model = PolynomialStepModel()
    assert prefill == pytest.approx(model.prefill(160))
    assert decode == pytest.approx(4 * model.decode(DecodeLoad(1, 11 * 16, 1600)), rel=0.1)
    slow = replace(OPTIONS, pace=PaceOptions(slow_prefill=3.0, slow_decode=2.0))
    assert seconds_of(slow, 160, 5) == pytest.approx((3 * prefill, 2 * decode))


def test_a_noisy_neighbour_takes_its_share_of_the_time_and_follows_its_seed() -> None:
    options = PaceOptions(slow_prefill=2.0, noise=4.0, noise_s=10.0, calm_s=30.0)
    one, same, other = Pace(options, "a"), Pace(options, "a"), Pace(options, "b")
    times = [t * 0.5 for t in range(40_000)]
    found = [one.factors(t, 0.0) for t in times]
    assert set(found) == {(2.0, 1.0), (8.0, 4.0)}
    assert sum(decode == 4.0 for _, decode in found) / len(times) == pytest.approx(0.25, abs=0.05)
    assert [same.factors(t, 0.0) for t in times] == found
    assert [other.factors(t, 0.0) for t in times] != found


def test_heat_slows_a_busy_engine_and_passes_when_it_rests() -> None:
    pace = Pace(PaceOptions(heat=3.0, heat_s=10.0), "")
    assert pace.factors(0.0, 0.0) == (1.0, 1.0)
    warm = [pace.factors(float(t), float(t))[0] for t in range(1, 101)]
    assert warm == sorted(warm)
    assert warm[3] == 1.0
    assert warm[-1] == pytest.approx(3.0, rel=0.01)
    assert pace.factors(110.0, 100.0)[0] < 1.5
    assert pace.factors(130.0, 100.0)[0] == 1.0


def test_an_engine_with_half_its_time_free_does_not_get_hot() -> None:
    pace = Pace(PaceOptions(heat=3.0, heat_s=10.0), "")
    assert WARM == 0.5
    assert all(pace.factors(float(t), t * 0.45)[0] == 1.0 for t in range(100))
