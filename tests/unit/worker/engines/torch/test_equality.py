"""The torch engine as ground truth: output does not depend on the source of its KV.

Log probabilities are compared to the last bit, in float32 on the CPU.
"""

from random import Random

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from msgspec.structs import replace
from support.tiny import tiny_model
from support.torch_core import BLOCK, Driver, load, make_core, make_work
from transformers import AutoModelForCausalLM

from kvmesh.hashing import block_hashes
from kvmesh.worker.engines.torch.blocks.block_io import BlocksRefused
from kvmesh.worker.engines.torch.model.paged_model import PagedModel

Answer = list[tuple[int, dict[int, float]]]


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return load(tiny_model())


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(8000) for _ in range(length)]


def uncached_answer(model: PagedModel, tokens: list[int], max_tokens: int = 12) -> Answer:
    driver = Driver(make_core(model))
    driver.run(make_work("cold", tokens, max_tokens))
    assert driver.cached("cold") == 0
    return driver.answer("cold")


def test_greedy_output_equals_transformers(model: PagedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(), attn_implementation="eager")
    for length in (1, 5, 16, 100):
        tokens = prompt(length, length)
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([tokens]), max_new_tokens=20, min_new_tokens=20, do_sample=False
            )
        driver = Driver(make_core(model))
        driver.run(make_work("a", tokens, 20, ignore_eos=False, min_tokens=20))
        assert [token for token, _ in driver.answer("a")] == out[0, length:].tolist()


def test_output_with_a_warm_prefix_is_equal(model: PagedModel) -> None:
    tokens = prompt(130)
    expected = uncached_answer(model, tokens)
    for warm in (16, 40, 129, 130):
        driver = Driver(make_core(model))
        driver.run(make_work("first", tokens[:warm], 1))
        driver.run(make_work("again", tokens))
        assert driver.cached("again") == min(warm, 129) // BLOCK * BLOCK
        assert driver.answer("again") == expected


def test_output_in_any_batch_is_equal(model: PagedModel) -> None:
    prompts = {f"r{i}": prompt(3 + 29 * i, i % 5) for i in range(8)}
    expected = {name: uncached_answer(model, tokens) for name, tokens in prompts.items()}
    for budget, batch in ((7, 8), (33, 3), (256, 8), (64, 5)):
        driver = Driver(make_core(model, blocks=128, budget=budget, batch=batch))
        driver.run(*(make_work(name, tokens) for name, tokens in prompts.items()))
        assert {name: driver.answer(name) for name in prompts} == expected


def test_generated_tokens_serve_as_a_prefix(model: PagedModel) -> None:
    tokens = prompt(45)
    driver = Driver(make_core(model))
    driver.run(make_work("first", tokens, 60))
    answered = [token for token, _ in driver.answer("first")]
    longer = [*tokens, *answered, *prompt(9, 3)]
    driver.run(make_work("second", longer))
    assert driver.cached("second") == 96
    assert driver.answer("second") == uncached_answer(model, longer)


def test_output_after_a_migration_is_equal(model: PagedModel) -> None:
    tokens = prompt(45)
    expected = uncached_answer(model, tokens, 30)
    answered = [token for token, _ in expected[:11]]
    driver = Driver(make_core(model))
    driver.run(replace(make_work("moved", tokens + answered, 30), generated=11))
    assert driver.answer("moved") == expected[11:]


def test_output_after_preemption_is_equal(model: PagedModel) -> None:
    prompts = {f"r{i}": prompt(50 + i, i) for i in range(4)}
    expected = {name: uncached_answer(model, tokens, 60) for name, tokens in prompts.items()}
    driver = Driver(make_core(model, blocks=18))
    driver.run(*(make_work(name, tokens, 60) for name, tokens in prompts.items()))
    assert driver.core.scheduler.preemptions > 0
    assert {name: driver.answer(name) for name in prompts} == expected


def test_output_from_reimported_blocks_is_equal(model: PagedModel) -> None:
    tokens = prompt(120)
    driver = Driver(make_core(model))
    driver.run(make_work("first", tokens))
    expected = driver.answer("first")
    blocks = driver.copy_out(tokens)
    driver.core.blocks.clear()
    driver.record(driver.core.take_events())
    assert not driver.held
    driver.run(*(make_work(f"other{i}", prompt(70, i)) for i in range(9)))
    assert driver.copy_in(blocks) == 7
    driver.run(make_work("again", tokens))
    assert driver.cached("again") == 112
    assert driver.answer("again") == expected


def test_output_from_blocks_of_another_engine_is_equal(model: PagedModel) -> None:
    tokens = prompt(200)
    expected = uncached_answer(model, tokens)
    there = Driver(make_core(load(tiny_model()), budget=48))
    there.run(make_work("noise", prompt(60, 9)), make_work("there", tokens, 1))
    here = Driver(make_core(model))
    here.run(make_work("begin", tokens[:50], 1))
    assert here.copy_in(there.copy_out(tokens)) == 12
    here.run(make_work("here", tokens))
    assert here.cached("here") == 192
    assert here.answer("here") == expected


def test_an_import_stops_at_the_capacity(model: PagedModel) -> None:
    tokens = prompt(160)
    there = Driver(make_core(load(tiny_model())))
    there.run(make_work("there", tokens, 1))
    here = Driver(make_core(model, blocks=6))
    here.run(make_work("old", prompt(60, 4), 1))
    assert here.copy_in(there.copy_out(tokens)) == 6
    assert here.held == here.core.blocks.contents == here.core.physical_blocks.contents


def test_blocks_of_another_model_or_layout_are_refused(model: PagedModel) -> None:
    tokens = prompt(64)
    here = Driver(make_core(model))
    here.run(make_work("here", tokens, 1))
    good = here.copy_out(tokens)
    stranger = Driver(make_core(load(tiny_model(seed=1))))
    with pytest.raises(BlocksRefused, match="another model"):
        stranger.copy_in(good)
    odd = Driver(make_core(load(tiny_model(), block_size=32)))
    with pytest.raises(BlocksRefused, match="layout"):
        odd.copy_in(good)
    assert not stranger.core.blocks.contents | odd.core.blocks.contents


def test_prompts_with_colliding_hashes_share_no_blocks(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {f"r{i}": [*prompt(40), *prompt(50 + 9 * i, i % 3)] for i in range(6)}
    expected = {name: uncached_answer(model, tokens, 40) for name, tokens in prompts.items()}

    def colliding(tokens: bytes, block_size: int, previous: int) -> tuple[bytes, bytes]:
        return block_hashes(bytes(len(tokens)), block_size, previous)

    monkeypatch.setattr("kvmesh.worker.enginecore.sequence.block_hashes", colliding)
    for blocks in (64, 24):
        driver = Driver(make_core(model, blocks=blocks))
        driver.run(*(make_work(name, tokens, 40) for name, tokens in prompts.items()))
        assert {name: driver.answer(name) for name in prompts} == expected
        driver.run(*(make_work(f"{name}b", tokens, 40) for name, tokens in prompts.items()))
        assert {name: driver.answer(f"{name}b") for name in prompts} == expected
    assert driver.held == driver.core.blocks.contents == driver.core.physical_blocks.contents


def test_an_import_stops_at_a_hash_held_for_other_tokens(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = prompt(100), [*prompt(40), *prompt(60, 1)]
    there = Driver(make_core(load(tiny_model())))
    here = Driver(make_core(model))

    def colliding(tokens: bytes, block_size: int, previous: int) -> tuple[bytes, bytes]:
        return block_hashes(bytes(len(tokens)), block_size, previous)

    monkeypatch.setattr("kvmesh.worker.enginecore.sequence.block_hashes", colliding)
    monkeypatch.setattr("support.torch_core.block_hashes", colliding)
    there.run(make_work("there", ours, 1))
    here.run(make_work("here", theirs, 1))
    assert here.copy_in(there.copy_out(ours)) == 2
    assert len(here.copy_out(ours).data) == 2
    assert len(here.copy_out(theirs).data) == 6
