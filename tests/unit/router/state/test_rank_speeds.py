"""Slow ranks are distinguished from busy ones by their step reports."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace
from support.routing import request, sequence, worker

from kvmesh.bus.messages import Load
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.state.rank_speeds import (
    EVIDENCE_S,
    FIT_S,
    MAX_SLOWNESS,
    RATE_HALF_S,
    RankSpeeds,
)
from kvmesh.settings.schema import RouterSettings
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.worker.engines.mock.timing import PolynomialStepModel

BLOCKS = 1000


@dataclass
class Engine:
    """An engine that steps through its own load, busy for a `share` of the time."""

    name: str
    slowness: float = 1.0
    prompt: int = 2000
    most_used: float = 0.6
    used: float = 0.0
    share: float = 0.5
    steps: int = 0
    busy_s: float = 0.0
    computed: int = 0
    output: int = 0

    def run(self, seconds: float, rng: Random) -> None:
        model, until = PolynomialStepModel(), self.busy_s + seconds * self.share
        while self.busy_s < until:
            tokens = self.prompt if rng.random() < 0.1 else 0
            load = DecodeLoad(8, int(self.used * 1e6), 1_000_000)
            self.busy_s += (model.prefill(tokens) + model.decode(load)) * self.slowness
            self.steps += 1
            self.computed += tokens
            self.output += 8

    def load(self) -> Load:
        return Load(
            instance=self.name,
            rank=0,
            running=8,
            waiting=0,
            active_blocks=int(self.used * BLOCKS),
            cached_blocks=0,
            total_blocks=BLOCKS,
            prefill_tokens=0,
            steps=self.steps,
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=self.output,
            requests=1,
            busy_s=self.busy_s,
            computed_tokens=self.computed,
        )


def watch(speeds: RankSpeeds, engines: list[Engine], seconds: int, start: int = 0) -> None:
    rng = Random(start)
    for second in range(start, start + seconds):
        for slot, engine in enumerate(engines):
            engine.used = rng.uniform(0.0, engine.most_used)
            engine.run(1.0, rng)
            speeds.observe(slot, engine.load(), float(second))
        speeds.update(float(second), len(engines))


def test_equal_engines_have_no_slowness_under_any_load() -> None:
    loads = [(100, 0.05), (8000, 0.1), (2000, 0.9), (500, 0.5), (4000, 0.02)]
    engines = [Engine(str(n), prompt=p, most_used=u) for n, (p, u) in enumerate(loads)]
    speeds = RankSpeeds()
    watch(speeds, engines, 120)
    assert speeds.slowness is None
    assert speeds.outliers == {}


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("factor", [3.0, 6.0])
def test_a_slow_engine_is_found_among_others(count: int, factor: float) -> None:
    engines = [Engine(str(n), prompt=1000 * (n + 1)) for n in range(count)]
    engines[-1].slowness = factor
    speeds = RankSpeeds()
    watch(speeds, engines, 40)
    assert list(speeds.outliers) == [count - 1]
    assert speeds.outliers[count - 1] == pytest.approx(factor, rel=0.3)
    assert speeds.factors(np.array([0, count - 1])) is not None


@pytest.mark.parametrize("used", [0.1, 0.3, 0.5])
def test_the_time_of_decoding_is_known_in_prompt_tokens(used: float) -> None:
    """An empty rank computes 16.5 ms / 15.2 µs = 1,087 tokens in the fixed time of a step."""
    speeds = RankSpeeds()
    assert speeds.decode_tokens(used, 8, 1087.0) == 0.0
    watch(speeds, [Engine("a", prompt=1000), Engine("b", prompt=4000)], 60)
    decode_s = PolynomialStepModel().decode(DecodeLoad(8, int(used * 1e6), 1_000_000))
    tokens = decode_s / 15.2e-6
    assert speeds.decode_tokens(used, 8, 1087.0) == pytest.approx(tokens, rel=0.35)


def test_no_engine_counts_as_more_than_ten_times_as_slow() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c", slowness=50.0)]
    speeds = RankSpeeds()
    watch(speeds, engines, 60)
    assert speeds.outliers == {2: MAX_SLOWNESS}


def test_a_slow_server_is_found_whose_steps_are_read_once_per_second() -> None:
    """Its tokens are known at once: each window has those of the steps whose time it has."""
    speeds, rng = RankSpeeds(), Random(1)
    engines = [Engine("a"), Engine("b"), Engine("slow", 3.0)]
    read = [engine.load() for engine in engines]
    for tick in range(400):
        now = tick / 10
        for slot, engine in enumerate(engines):
            engine.used = rng.uniform(0.0, engine.most_used)
            engine.run(0.1, rng)
            load = engine.load()
            if tick % 10 == 3 * slot:
                read[slot] = load
            polled = replace(load, steps=read[slot].steps, busy_s=read[slot].busy_s)
            speeds.observe(slot, polled, now)
        speeds.update(now, len(engines))
    assert speeds.measured[2].speed == pytest.approx(1 / 3, rel=0.3)
    assert speeds.measured[0].speed == pytest.approx(1.0, rel=0.2)
    computed = sum(engine.computed / engine.busy_s for engine in engines[:2]) / 2
    assert speeds.prefill_rate < 4 * computed


def test_a_recovered_engine_counts_as_normal() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c", slowness=5.0)]
    speeds = RankSpeeds()
    watch(speeds, engines, 40)
    assert list(speeds.outliers) == [2]
    engines[2].slowness = 1.0
    watch(speeds, engines, 40, start=40)
    assert speeds.outliers == {}


def test_speeds_of_all_engines_are_known_and_since_when_one_is_slow() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c"), Engine("idle", share=0.0)]
    speeds = RankSpeeds()
    watch(speeds, engines, 40)
    assert sorted(speeds.measured) == [0, 1, 2]
    assert all(0.8 < found.speed < 1.25 for found in speeds.measured.values())
    assert all(found.since is None for found in speeds.measured.values())
    engines[2].slowness = 4.0
    watch(speeds, engines, 40, start=40)
    speed, since = speeds.measured[2]
    assert speed == pytest.approx(0.25, rel=0.3)
    assert since is not None
    assert 40 <= since <= 40 + 4 * FIT_S
    engines[2].slowness = 1.0
    watch(speeds, engines, 40, start=80)
    assert speeds.measured[2].since is None


def test_an_avoided_engine_is_tried_again_after_a_while() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c", slowness=5.0)]
    speeds = RankSpeeds()
    watch(speeds, engines, 40)
    engines[2].share = 0.0
    watch(speeds, engines, int(EVIDENCE_S + 2 * FIT_S), start=40)
    assert speeds.outliers == {}


def test_slowness_multiplies_the_cost() -> None:
    router = RouterCore("m", "router", RouterSettings(prefill_weight=1.0), Random(0))
    engines = [Engine("a"), Engine("b"), Engine("c", slowness=5.0)]
    for engine in engines:
        router.join(worker(engine.name, ranks=1))
    rng = Random(1)
    for second in range(40):
        for engine in engines:
            engine.used = 0.0
            engine.run(1.0, rng)
            router.apply_load(engine.load(), float(second))
        router.expire(float(second))
    decision = router.decide(request("1", sequence(*range(10))), None, 40.0)
    costs = {candidate.instance: candidate.cost for candidate in decision.candidates}
    assert costs["a"] == costs["b"]
    assert costs["c"] == pytest.approx(5 * costs["a"], rel=0.3)
    router.leave("c")
    router.join(worker("d"))
    decision = router.decide(request("2", sequence(*range(10))), None, 41.0)
    assert {c.cost for c in decision.candidates} == {costs["a"]}


def test_a_slow_engine_counts_within_seconds_and_less_the_older_the_evidence() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c", slowness=3.0)]
    speeds = RankSpeeds()
    watch(speeds, engines, 6)
    assert speeds.learned(2) > 1.4
    assert speeds.learned(0) == speeds.learned(1) == 1.0
    watch(speeds, engines, 54, start=6)
    known = speeds.learned(2)
    assert known == pytest.approx(3.0, rel=0.3)
    engines[2].share = 0.0
    watch(speeds, engines, 60, start=60)
    assert 1.0 < speeds.learned(2) < known**0.6
    assert speeds.seconds is not None
    model = PolynomialStepModel()
    token = model.prefill(2000) / 2000
    assert speeds.seconds.prompt_token == pytest.approx(token, rel=0.5)
    assert speeds.prompt_token_s == speeds.seconds.prompt_token


def test_an_engine_that_is_slow_again_and_again_is_followed() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c")]
    speeds = RankSpeeds()
    for turn in range(6):
        engines[2].slowness = 4.0 if turn % 2 else 1.0
        watch(speeds, engines, 20, start=20 * turn)
        assert (speeds.learned(2) > 1.6) is bool(turn % 2)


def test_slowness_that_is_not_trusted_does_not_count() -> None:
    engines = [Engine("a"), Engine("b"), Engine("c", slowness=3.0)]
    speeds = RankSpeeds()
    watch(speeds, engines, 40)
    assert speeds.factors(np.array([0, 1, 2])) is not None
    speeds.trusted = False
    assert speeds.factors(np.array([0, 1, 2])) is None
    assert speeds.learned(2) > 2.0


def test_an_earlier_prefill_rate_fades_also_where_ranks_are_not_compared() -> None:
    """Ten prompts of 2,000 tokens a second, and after RATE_HALF_S ten of 400."""
    speeds, load = RankSpeeds(), Engine("a").load()
    assert speeds.prompt_token_s == 0.0
    at, busy_s, computed, rates = 0.0, 1.0, 0, []
    for tokens, pause_s in ((0, 0.0), (20_000, 1.0), (4_000, RATE_HALF_S)):
        at, busy_s, computed = at + pause_s, busy_s + 1.0, computed + tokens
        speeds.observe(
            0, replace(load, steps=computed, busy_s=busy_s, computed_tokens=computed), at
        )
        rates.append(speeds.prefill_rate)
    assert speeds.prompt_token_s == 1 / speeds.prefill_rate
    assert rates == pytest.approx([0.0, 20_000.0, 10_000.0])
