"""The learned step times equal those of the engine that the load reports describe."""

import math
from dataclasses import dataclass

import pytest
from support.planned_model import BLOCK, TIMES, LinearEngine

from kvmesh.bus.messages import Load
from kvmesh.planner.capacity.step_times import (
    CELLS,
    MIN_SAMPLES,
    SAMPLES_PER_CELL,
    FittedStepTimes,
    StepTimesFit,
)


def fit() -> StepTimesFit:
    return StepTimesFit(BLOCK, 8192, 400_000)


def changed(load: Load, **values: float) -> Load:
    return Load(**{**{name: getattr(load, name) for name in load.__struct_fields__}, **values})


def fitted(collected: StepTimesFit) -> FittedStepTimes:
    times = collected.fitted()
    assert times is not None
    return times


@dataclass
class Engine:
    """Reports of an engine whose batch the test chooses."""

    steps: int = 0
    prefills: int = 0
    tokens: int = 0
    busy: float = 0.0

    def take(
        self, decodes: int, prefills: int, tokens: int, kv: int, decoding: int = 4, mixed: int = 0
    ) -> Load:
        """`mixed` steps decode and prefill, so they count in both."""
        self.steps += decodes + prefills - mixed
        self.prefills += prefills
        self.tokens += tokens
        self.busy += TIMES.step * decodes + TIMES.kv_token * kv * decodes
        self.busy += TIMES.prefill_step * prefills + TIMES.token * tokens
        return Load(
            instance="w", rank=0, running=4, waiting=0, active_blocks=999, cached_blocks=0,
            total_blocks=6250, prefill_tokens=0, steps=self.steps, prompt_tokens=0,
            cached_tokens=0, output_tokens=0, requests=0, busy_s=self.busy,
            computed_tokens=self.tokens, decoding=decoding, decode_tokens=kv if decoding else 0,
            prefill_steps=self.prefills,
        )  # fmt: skip


def test_tokens_count_until_steps_are_read_again() -> None:
    """A server's steps and their time may be read less often than its tokens are counted."""
    collected, engine = fit(), Engine()
    collected.add(engine.take(1, 0, 0, 2000))
    read = engine.take(0, 0, 0, 2000)
    collected.add(read)
    later = engine.take(3, 2, 900, 2000)
    collected.add(changed(later, steps=read.steps, busy_s=read.busy_s))
    collected.add(later)
    (sample,) = [sample for cell in collected.cells for sample in cell]
    assert sample.tokens == 900


def test_coefficients_of_a_linear_engine_are_recovered() -> None:
    collected, engine = fit(), Engine()
    for number in range(200):
        kv = 2000 + number % 40 * 10_000
        # both reports of a sample have the same batch
        collected.add(engine.take(0, 0, 0, kv))
        collected.add(engine.take(8 + number % 7, number % 5, number % 5 * (300 + number), kv,
                                  mixed=number % 5))  # fmt: skip
    times = fitted(collected)
    assert times.step == pytest.approx(TIMES.step, rel=0.02)
    assert times.prefill_step == pytest.approx(TIMES.prefill_step, rel=0.05)
    assert times.token == pytest.approx(TIMES.token, rel=0.02)
    assert times.kv_token == pytest.approx(TIMES.kv_token, rel=0.05)


def test_a_prefill_worker_has_all_time_in_its_prefill_steps() -> None:
    collected, engine = fit(), Engine()
    for number in range(40):
        prefills = 1 + number % 6
        collected.add(engine.take(0, prefills, prefills * 500 * (1 + number % 9), 0, decoding=0))
    times = fitted(collected)
    assert times.prefill(4000) == pytest.approx(TIMES.prefill(4000), rel=0.02)
    assert times.prefill_step == pytest.approx(TIMES.prefill_step, rel=0.05)


def test_steps_of_few_prompt_tokens_count_as_prefill_steps_where_the_engine_reports_them() -> None:
    collected, engine = fit(), Engine()
    for number in range(60):
        prefills = number % 4 * 3  # of 100 tokens each: one full step would hold them all
        collected.add(engine.take(20, prefills, 100 * prefills, 50_000, mixed=prefills))
    times = fitted(collected)
    assert times.prefill(100) == pytest.approx(TIMES.prefill(100), rel=0.05)


def test_an_engine_without_prefill_steps_and_decoding_is_taken_to_fill_its_steps() -> None:
    collected, engine = fit(), Engine()
    for number in range(80):
        kv, prefills = 640 * (10 + number % 50), number % 4
        load = engine.take(20, prefills, 8192 * prefills, kv, mixed=prefills)
        plain = {
            "prefill_steps": 0,
            "decoding": 0,
            "decode_tokens": 0,
            "active_blocks": kv // BLOCK,
        }
        collected.add(changed(load, **plain))
    times = fitted(collected)
    assert times.prefill(8192) == pytest.approx(TIMES.prefill(8192), rel=0.05)
    assert times.decode(4, 20_000) == pytest.approx(TIMES.decode(4, 20_000), rel=0.1)


def test_collinear_samples_give_the_time_of_that_load() -> None:
    collected, engine = fit(), Engine()
    for _ in range(40):
        collected.add(engine.take(10, 2, 4000, 100_000, mixed=2))
    times = fitted(collected)
    one = times.decode(4, 100_000) * 10 + times.prefill(2000) * 2
    assert one == pytest.approx(TIMES.decode(4, 100_000) * 10 + TIMES.prefill(2000) * 2, rel=0.01)
    assert min(times.step, times.prefill_step, times.token, times.kv_token) >= 0


def test_nothing_is_learned_from_scarce_samples_or_without_prefill() -> None:
    collected, engine = fit(), LinearEngine("w")
    for _ in range(MIN_SAMPLES):  # the first report gives no sample
        collected.add(engine.load())
    assert collected.samples == MIN_SAMPLES - 1
    assert collected.fitted() is None
    collected.add(engine.load())
    assert collected.fitted() is not None
    collected, decoding = fit(), Engine()
    for _ in range(100):
        collected.add(decoding.take(10, 0, 0, 5000))
    assert collected.fitted() is None


def test_an_engine_that_does_not_report_its_busy_time_is_ignored() -> None:
    collected, engine = fit(), LinearEngine("w")
    for _ in range(50):
        collected.add(changed(engine.load(), busy_s=0.0))
    assert collected.samples == 0
    assert collected.fitted() is None


@pytest.mark.parametrize("busy", [math.nan, math.inf, -math.inf, -5.0])
def test_a_malformed_busy_time_spoils_nothing(busy: float) -> None:
    collected, engine = fit(), LinearEngine("w")
    for _ in range(30):
        collected.add(engine.load())
        collected.add(changed(engine.load(), busy_s=busy))
        collected.add(engine.load())
    assert fitted(collected).token == pytest.approx(TIMES.token, rel=0.2)


def test_a_restarted_rank_and_a_repeated_report_give_no_sample() -> None:
    collected, engine = fit(), LinearEngine("w")
    load = engine.load()
    collected.add(load)
    collected.add(load)
    collected.add(LinearEngine("w", seed=1).load(prefill_steps=0))
    assert collected.samples <= 1
    collected.add(changed(load, steps=0, busy_s=0.0, computed_tokens=0))
    before = collected.samples
    collected.add(changed(load, steps=0, busy_s=0.0, computed_tokens=0))
    assert collected.samples == before


def test_samples_and_reports_are_bounded() -> None:
    collected, engine = fit(), LinearEngine("w")
    for _ in range(5000):
        collected.add(engine.load())
    assert collected.samples <= SAMPLES_PER_CELL * CELLS**2
    for number in range(50):
        collected.add(LinearEngine(f"w-{number}").load())
        collected.left(f"w-{number}")
    assert len(collected._last) == 1


def test_an_engine_without_a_limit_of_tokens_per_step_is_accepted() -> None:
    collected, engine = StepTimesFit(BLOCK, 0, 0), LinearEngine("w")
    for _ in range(40):
        collected.add(engine.load())
    assert fitted(collected).token > 0
