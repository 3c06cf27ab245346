"""Sampling of the torch engine."""

from collections import Counter

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from torch import Tensor

from kvmesh.bus.messages import Sampling
from kvmesh.worker.engines.torch.model.sampling import SampledToken, Sampler

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0, -2.0])


def sampler(
    output: list[int] | None = None, prompt: list[int] | None = None, **fields: object
) -> Sampler:
    sampling = Sampling(**{"max_tokens": 100, **fields})  # type: ignore[arg-type]
    return Sampler(sampling, prompt or [], output or [], frozenset({5}), seed=1)


def greedy(logits: Tensor = LOGITS, index: int = 0, **fields: object) -> SampledToken:
    return sampler(temperature=0.0, **fields).sample(logits, index)  # type: ignore[arg-type]


def drawn(count: int = 400, **fields: object) -> Counter[int]:
    one = sampler(**fields)  # type: ignore[arg-type]
    return Counter(one.sample(LOGITS, index).token for index in range(count))


def test_greedy_sampling_returns_the_top_token() -> None:
    assert greedy() == SampledToken(1, None, False)


def test_log_probabilities_precede_adjustments() -> None:
    sampled = greedy(logprobs=2, logit_bias={3: 50.0})
    expected = torch.log_softmax(LOGITS, -1).tolist()
    assert sampled.token == 3
    assert sampled.logprobs is not None
    assert list(sampled.logprobs) == [3, 1, 2]
    assert list(sampled.logprobs.values()) == pytest.approx([expected[i] for i in (3, 1, 2)])
    assert len(greedy(logprobs=0).logprobs or {}) == 1


def test_draws_follow_the_distribution() -> None:
    share = drawn(4000)[1] / 4000
    assert share == pytest.approx(float(torch.softmax(LOGITS, -1)[1]), abs=0.03)


def test_a_seed_and_an_index_determine_a_draw() -> None:
    def run(places: range, seed: int) -> list[int]:
        one = sampler(seed=seed, temperature=2.0)
        return [one.sample(LOGITS, place).token for place in places]

    assert run(range(40), 7) == run(range(40), 7)
    assert run(range(20, 40), 7) == run(range(40), 7)[20:]
    assert run(range(40), 7) != run(range(40), 8)


def test_top_k_top_p_and_min_p_retain_the_top_tokens() -> None:
    assert set(drawn(top_k=2, temperature=3.0)) == {1, 2}
    assert set(drawn(top_p=0.6)) == {1}
    assert set(drawn(top_p=0.7)) == {1, 2}
    assert set(drawn(min_p=0.3, temperature=1.0)) == {1, 2}
    assert set(drawn(top_p=1e-9)) == {1}
    assert set(drawn(temperature=1e-8)) == {1}


def test_penalties() -> None:
    assert greedy(output=[1], presence_penalty=1.5).token == 2
    assert greedy(output=[1], frequency_penalty=0.6).token == 1
    assert greedy(output=[1, 1], frequency_penalty=0.6).token == 2
    assert greedy(prompt=[1], presence_penalty=1.5).token == 1
    assert greedy(prompt=[1], repetition_penalty=2.0).token == 2
    assert greedy(output=[1], prompt=[2], repetition_penalty=4.0).token == 3
    negative = torch.tensor([-4.0, -3.0, -3.5])
    assert greedy(negative, output=[1], repetition_penalty=1.3).token == 2


def test_penalties_count_sampled_tokens() -> None:
    one = sampler(temperature=0.0, presence_penalty=10.0)
    assert [one.sample(LOGITS, index).token for index in range(4)] == [1, 2, 3, 0]


def test_stops() -> None:
    end = torch.tensor([0.0, 0, 0, 0, 0, 9])
    assert greedy(end).stop
    assert not greedy(end, ignore_eos=True).stop
    assert greedy(end, ignore_eos=True, stop_token_ids=[5]).stop
    assert greedy(LOGITS, stop_token_ids=[1]).stop


def test_min_tokens_suppress_stop_tokens() -> None:
    end = torch.tensor([0.0, 3, 0, 0, 0, 9])
    assert greedy(end, index=2, min_tokens=3, stop_token_ids=[1]).token not in (1, 5)
    assert greedy(end, index=3, min_tokens=3) == SampledToken(5, None, True)


def test_a_bias_may_exclude_a_token() -> None:
    assert greedy(logit_bias={1: -100.0, 99: 5.0}).token == 2
