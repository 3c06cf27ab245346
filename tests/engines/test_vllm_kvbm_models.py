"""Blocks of the models that agents use, from vLLM to the kvbm and back, proved by logits.

Each model has large linear layers, so that loading its blocks beats computing them.
"""

import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from support.lora import make_adapter
from support.nats import NatsServer, free_port
from support.random_models import (
    make_attention_model,
    make_hybrid_model,
    make_mla_model,
    make_sliding_window_model,
    make_unlike_layers_model,
)
from support.vllm import SIZE, VllmRun, prompt, work
from support.vllm_kvbm import KvbmRun, Logprobs, cached_mla, faulty_loads, kvbm_run

from kvmesh.hashing import salt
from kvmesh.worker.engine import EngineError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTH = 300
WINDOW = 2 * SIZE
WINDOWED = "sliding window"
LINEAR = "linear attention"
UNLIKE = "unlike layers"


class Case(NamedTuple):
    """A vLLM with a model, and the folder with its faults (`faulty_loads`).

    `has_windows` and `has_states`: the model continues a prompt only where vLLM has kept these.
    """

    run: KvbmRun
    folder: Path
    has_windows: bool
    has_states: bool

    @property
    def noise(self) -> float:
        """Difference of a log probability between a prompt computed whole and in parts."""
        return 0.08 if self.has_states else 0.01  # bfloat16: 2.5 units of a logit


def make_model(name: str, folder: Path) -> list[str]:
    """Write a model; returns vLLM's arguments for it."""
    if name == "tensor parallel":
        make_attention_model(folder)
        return ["tensor_parallel_size=2"]
    if name == WINDOWED:
        make_sliding_window_model(folder, WINDOW, intermediate=16384)
        return ["num_gpu_blocks_override=97"]
    if name == UNLIKE:
        make_unlike_layers_model(folder, WINDOW, intermediate=16384)
        return ["disable_hybrid_kv_cache_manager=true"]
    if name == LINEAR:
        make_hybrid_model(folder, intermediate=16384)
        return ["num_gpu_blocks_override=97", "dtype=bfloat16"]
    make_mla_model(folder)
    return ["tensor_parallel_size=2"] if "tensor parallel" in name else []


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["tensor parallel", WINDOWED, LINEAR, UNLIKE, "MLA, tensor parallel"],
)
async def case(
    request: pytest.FixtureRequest,
    nats_server: NatsServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Case]:
    folder = tmp_path_factory.mktemp("case")
    args = make_model(request.param, folder / "model")
    with faulty_loads(folder), cached_mla():
        async with kvbm_run(nats_server, folder, folder / "model", *args) as run:
            yield Case(run, folder, request.param == WINDOWED, request.param == LINEAR)


async def test_loaded_blocks_give_the_same_logits(case: Case) -> None:
    run, tokens = case.run, prompt(LENGTH)
    cold = await run.logprobs("cold", tokens)
    warm = await run.logprobs("warm", tokens)
    assert run.sink.cached("cold") == 0
    depth = (LENGTH - 1) // run.info.block_size * run.info.block_size
    assert run.sink.cached("warm") == depth
    loaded = await run.onboarded(tokens, depth)
    assert run.sink.tiers("loaded") == [0, depth]
    assert loaded == warm
    for wrong in ["zeros", "zero states"] if case.has_states else ["zeros"]:
        with fault(case, wrong):
            differing = await run.onboarded(tokens, depth)
            assert difference(cold[:1], differing[:1]) > 0.1, wrong


async def test_what_cannot_be_loaded_is_computed(case: Case) -> None:
    run, tokens, size = case.run, prompt(LENGTH, first=55), case.run.info.block_size
    expected = await run.logprobs("cold", tokens)
    await run.onboarded(tokens, (LENGTH - 1) // size * size)
    with fault(case, "lost"):
        await run.clear_cache()
        assert await run.logprobs("computed", tokens) == expected
        assert run.sink.cached("computed") == 0
    await run.onboarded(tokens, (LENGTH - 1) // size * size)


async def test_a_frozen_block_manager_delays_a_request_by_seconds_at_most(case: Case) -> None:
    run, tokens, size = case.run, prompt(LENGTH, first=31), case.run.info.block_size
    expected = await run.generate("before", tokens)
    await run.clear_cache()
    process = run.mesh.processes["kvbm-0"]
    process.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert await run.generate("during", tokens) == expected
        assert time.monotonic() - start < 10
    finally:
        process.send_signal(signal.SIGCONT)
    await run.onboarded(tokens, (LENGTH - 1) // size * size)


async def test_a_longer_prompt_continues_a_loaded_one(case: Case) -> None:
    run, size = case.run, case.run.info.block_size
    first, longer = prompt(5 * SIZE + 10, first=7), prompt(9 * SIZE + 20, first=7)
    expected = await run.logprobs("whole", longer)
    other = prompt(5 * SIZE + 10, first=1234)
    await run.generate("first", other)
    await run.onboarded(other, (5 * SIZE + 9) // size * size)
    assert difference(expected[:1], (await run.logprobs("once more", longer))[:1]) < case.noise
    await run.onboarded(first, (5 * SIZE + 9) // size * size)
    loaded = await run.onboarded(longer, (9 * SIZE + 19) // size * size)
    assert difference(expected[:1], loaded[:1]) < case.noise


async def test_a_prompt_loads_what_it_shares_with_others(case: Case) -> None:
    """Of states, only those at the ends of the other prompts are there."""
    run, size = case.run, case.run.info.block_size
    long, short = prompt(LENGTH, first=2500), prompt(5 * SIZE + 10, first=2500)
    branch = prompt(7 * SIZE + 6, first=2500) + prompt(2 * SIZE, first=3300)
    apart = {"salt": salt("tiny", "", "apart"), "tenant": "apart"}
    # vLLM itself continues from the end of these, computed in the same parts
    for name, tokens in [("short", short), ("long", long)][: 1 if case.has_states else 2]:
        await run.generate(name, tokens, **apart)
    expected = await run.logprobs("whole", branch, **apart)
    reused = run.sink.cached("whole")
    for tokens in (short, long):
        await run.generate("once", tokens)
        await run.onboarded(tokens, (len(tokens) // 4 - 1) // size * size)
    await run.clear_cache()
    loaded = await run.logprobs("branch", branch)
    shared = 5 * SIZE if case.has_states else (7 * SIZE + 6) // size * size
    assert run.sink.cached("branch") == shared
    assert run.sink.tiers("branch") == [0, shared]
    if reused:
        assert reused == shared
        assert loaded == expected
    else:  # vLLM keeps a window only where it has seen two prompts differ
        assert case.has_windows
        assert difference(expected[:1], loaded[:1]) < 0.01


async def test_a_tenant_loads_no_blocks_of_another(case: Case) -> None:
    run, tokens, size = case.run, prompt(LENGTH, first=99), case.run.info.block_size
    depth = (LENGTH - 1) // size * size
    await run.generate("one", tokens, tenant="one", salt=salt("tiny", "", "one"))
    await run.onboarded(tokens, depth, tenant="one", salt=salt("tiny", "", "one"))
    await run.generate("two", tokens, tenant="two", salt=salt("tiny", "", "two"))
    assert run.sink.cached("two") == 0


async def test_blocks_of_an_adapter_are_its_own(nats_server: NatsServer, tmp_path: Path) -> None:
    make_attention_model(tmp_path / "model")
    adapters = [f"poet={make_adapter(tmp_path / 'poet')}"]
    async with kvbm_run(nats_server, tmp_path, tmp_path / "model", adapters=adapters) as run:
        (poet,) = run.info.adapters
        tokens, of_poet = prompt(LENGTH), {"adapter": poet, "salt": salt("tiny", poet)}
        warm = await run.logprobs("first", tokens, **of_poet)
        warm = await run.logprobs("warm", tokens, **of_poet)
        assert await run.onboarded(tokens, 288, **of_poet) == warm
        assert await run.logprobs("plain", tokens) != warm
        assert run.sink.cached("plain") == 0


async def test_what_a_decode_engine_receives_is_written_through(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """The decode engine has NIXL and the kvbm; the kvbm gets what another engine computed."""
    pytest.importorskip("nixl")
    make_attention_model(tmp_path / "model")
    transfer = [
        "kv_transfer_config.kv_connector=NixlConnector",
        "kv_transfer_config.kv_role=kv_both",
        "kv_transfer_config.kv_buffer_device=cpu",
    ]
    tokens = prompt(330)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        prefill = await VllmRun.start(tmp_path / "model", *transfer)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        async with kvbm_run(nats_server, tmp_path, tmp_path / "model", *transfer) as decode:
            await prefill.run_works(work("a", tokens, max_tokens=1, prefill=True))
            handoff = prefill.sink.deltas["a"][-1].handoff
            received = await decode.logprobs("a", tokens, handoff=handoff)
            assert decode.loaded_blocks() == 0
            loaded = await decode.onboarded(tokens, 320)
            assert difference(received[:1], loaded[:1]) < 0.01
            assert decode.sink.tiers("loaded") == [0, 320]
        await prefill.engine.close()


async def test_a_model_with_another_kind_of_state_is_refused(
    nats_server: NatsServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from support.random_models import make_linear_attention_model

    make_linear_attention_model(tmp_path / "model")
    with pytest.raises(EngineError):
        async with kvbm_run(nats_server, tmp_path, tmp_path / "model"):
            pass
    printed = "".join(capfd.readouterr())
    assert "cannot store the KV of backbone.layers.0.mixer (MambaSpec)" in printed


@contextmanager
def fault(case: Case, name: str) -> Iterator[None]:
    """Let all loads of the case fail in one way."""
    (case.folder / name).touch()
    try:
        yield
    finally:
        (case.folder / name).unlink()


def difference(one: Logprobs, other: Logprobs) -> float:
    """The greatest difference of a log probability; infinite if the tokens differ much."""
    differences = [
        abs(value - theirs[token])
        for ours, theirs in zip(one, other, strict=True)
        for token, value in ours.items()
        if token in theirs
    ]
    return max(differences, default=float("inf"))
