"""The vLLM engine on a real vLLM: the engine contract, and events that equal its cache."""

import asyncio
import json
import random
import shutil
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from support.engine_suite import EngineSuite
from support.nats import free_port
from support.vllm import VllmRun, prompt, work
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.messages import Clear, Guided, Sampling
from kvmesh.worker.capabilities import RoleSwitching
from kvmesh.worker.engine import EngineConfigError, EngineError, Rejected

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path) -> AsyncIterator[VllmRun]:
    made = await VllmRun.start(tiny_model)
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> VllmRun:
    """The shared engine with an empty cache and a fresh record."""
    await asyncio.wait_for(shared.engine.drain(), 60)
    await shared.wait_for_events()
    await shared.engine.clear(Clear())
    await eventually(lambda: not shared.held_hashes, what="the cache is empty")
    shared.sink.deltas.clear()
    shared.sink.order.clear()
    return shared


class TestVllm(EngineSuite):
    """The suite of all engines, on vLLM."""


async def test_concurrent_equal_prompts_are_held_until_their_last_copy_is_removed(
    started: VllmRun,
) -> None:
    await started.run_works(*(work(f"r{i}", prompt(200), max_tokens=2) for i in range(4)))
    await started.wait_for_events()
    assert started.depth(prompt(200)) == 192
    await started.run_works(work("again", prompt(200), max_tokens=1))
    assert started.sink.cached("again") == 192


async def test_events_under_random_load_predict_cached_tokens(started: VllmRun) -> None:
    """Blocks are evicted all the time; every prediction from the events is what vLLM reports."""
    rng = random.Random(5)
    removed = started.sink.removed
    for round_ in range(12):
        batch = [
            work(f"x{round_}-{i}", prompt(rng.randrange(40, 400), rng.randrange(6)), 4)
            for i in range(6)
        ]
        await started.run_works(*batch)
        await started.wait_for_events()
        probe = prompt(rng.randrange(40, 400), rng.randrange(6))
        expected = started.depth(probe)
        await started.run_works(work(f"probe{round_}", probe, max_tokens=1))
        assert started.sink.cached(f"probe{round_}") == expected
    assert started.sink.removed > removed
    await started.wait_for_events()
    assert started.load().cached_blocks == len(started.sink.held[0])
    before = set(started.sink.held[0])
    started.engine.dump(0)
    assert started.sink.held[0] == before


async def test_clear_empties_the_cache_once_no_request_uses_it(started: VllmRun) -> None:
    started.engine.submit(work("a", prompt(100), max_tokens=200))
    await eventually(lambda: started.held_hashes)
    outcome = await started.engine.clear(Clear())
    assert "clear again once they end" in outcome.kept[0]
    await started.ended("a")

    async def is_cleared() -> bool:
        return not (await started.engine.clear(Clear())).kept

    await eventually(is_cleared, what="no request uses the blocks")
    await eventually(lambda: not started.held_hashes)


async def test_a_schema_is_followed(started: VllmRun) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    guided = Guided(kind="json_schema", value=json.dumps(schema))
    sampling = Sampling(max_tokens=40, temperature=0.0, guided=guided)
    await started.run_works(work("a", prompt(40), sampling=sampling))
    from tokenizers import Tokenizer

    from kvmesh.demo import model_dir

    text = Tokenizer.from_file(str(model_dir() / "tokenizer.json")).decode(started.sink.tokens("a"))
    assert json.loads(text)["n"] in (1, 2)
    choice = Guided(kind="choice", value='["yes", "no"]')
    await started.run_works(
        work("b", prompt(40), sampling=Sampling(max_tokens=9, temperature=0.0, guided=choice))
    )
    assert started.sink.finish("b") == "stop"


async def test_streams_continue_while_a_constraint_is_compiled(
    started: VllmRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.structured_output import backend_xgrammar

    validate, ended = backend_xgrammar.validate_xgrammar_grammar, threading.Event()

    def validate_slowly(params: Any) -> None:
        assert ended.wait(PATIENCE_S)
        validate(params)

    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", validate_slowly)
    started.engine.submit(work("stream", prompt(40), max_tokens=200))
    await eventually(lambda: started.sink.tokens("stream"))
    guided = Guided(kind="regex", value="(a|b){8}")
    sampling = Sampling(max_tokens=9, temperature=0.0, guided=guided)
    started.engine.submit(work("constrained", prompt(40), sampling=sampling))
    await started.ended("stream")
    assert not started.sink.tokens("constrained")
    ended.set()
    await started.ended("constrained")
    assert started.sink.finish("constrained") == "stop"


async def test_bad_constraints_and_ranks_are_rejected(started: VllmRun) -> None:
    guided = Guided(kind="json_schema", value='{"type": "nonsense"}')
    await started.run_works(work("a", prompt(40), sampling=Sampling(max_tokens=4, guided=guided)))
    assert started.sink.finish("a") == "error"
    assert started.sink.deltas["a"][-1].error
    assert started.sink.deltas["a"][-1].invalid
    engine: Any = started.engine
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a"}}
    with pytest.raises(Rejected, match="regex"):
        await engine.compile(Guided(kind="structural_tag", value=json.dumps(tag)))
    with pytest.raises(Rejected, match="rank 9"):
        started.engine.submit(work("b", prompt(40), rank=9))
    with pytest.raises(Rejected, match="temperature"):
        started.engine.submit(
            work("c", prompt(40), sampling=Sampling(max_tokens=4, temperature=-1))
        )


async def test_the_load_comes_from_the_scheduler(started: VllmRun) -> None:
    for i in range(7):
        started.engine.submit(work(f"r{i}", prompt(100, first=i), max_tokens=100))

    def loaded() -> bool:
        load = started.load()
        return (load.running, load.waiting) == (4, 3) and load.active_blocks >= 16

    await eventually(loaded)
    before = started.load().steps
    await started.ended(*(f"r{i}" for i in range(7)))
    assert started.load().steps > before
    assert (started.load().running, started.load().active_blocks) == (0, 0)


async def test_the_load_has_the_batch_and_the_prefill_steps(started: VllmRun) -> None:
    before = started.engine.load("")[0]
    started.engine.submit(work("batch", prompt(100, first=77), max_tokens=200))
    await eventually(lambda: started.engine.load("")[0].decoding == 1)
    assert started.engine.load("")[0].decode_tokens >= 100
    await started.ended("batch")

    def counted() -> bool:
        return started.engine.load("")[0].prefill_steps == before.prefill_steps + 1

    await eventually(counted, what="the step that computed the prompt")
    after = started.engine.load("")[0]
    assert (after.decoding, after.decode_tokens, after.waiting_tokens) == (0, 0, 0)
    assert after.steps - before.steps > 100


async def test_a_folder_without_a_model_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rejects its arguments(.|\n)*config\.json"):
        await VllmRun.start(tmp_path)


async def test_a_folder_without_weights_fails_the_start_by_the_error_of_the_process_that_loads(
    tiny_model: Path, tmp_path: Path
) -> None:
    without = tmp_path / "without weights"
    shutil.copytree(tiny_model, without, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(EngineError, match="has no weights"):
        await VllmRun.start(without)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("no_such_argument=1", "no_such_argument"),
        ("max_model_len=99999999", r"max_model_len \(99999999\) is greater"),
        ("dtype=float12", "dtype"),
        ("max_num_seqs=0", "max_num_seqs"),
    ],
)
async def test_an_argument_that_vllm_rejects_is_an_error_of_configuration(
    tiny_model: Path, argument: str, reason: str
) -> None:
    with pytest.raises(EngineConfigError, match=reason) as raised:
        await VllmRun.start(tiny_model, argument)
    assert "errors.pydantic.dev" not in str(raised.value)


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "vLLM has died"), (signal.SIGSTOP, "vLLM has been stopped")],
    ids=["killed", "stopped"],
)
async def test_the_death_of_the_engine_process_is_reported(
    tiny_model: Path, number: signal.Signals, message: str
) -> None:
    psutil = pytest.importorskip("psutil")
    mine = psutil.Process()
    others = set(mine.children(recursive=True))
    run = await VllmRun.start(tiny_model)
    run.engine.submit(work("a", prompt(80), max_tokens=400))
    await eventually(lambda: run.sink.tokens("a"))
    for child in set(mine.children(recursive=True)) - others:
        if "EngineCore" in child.name():
            child.send_signal(number)
    await eventually(lambda: run.sink.errors, timeout=30)
    assert message in str(run.sink.errors[0])
    await run.engine.close()

    def left() -> list[str]:
        return [child.name() for child in set(mine.children()) - others]

    await eventually(lambda: not [name for name in left() if "EngineCore" in name])


async def test_engines_fetch_each_others_blocks_whatever_their_role(tiny_model: Path) -> None:
    """Two engines, NIXL between their processes: same answer, and nothing computed twice."""
    pytest.importorskip("nixl")
    transfer = [
        "kv_transfer_config.kv_connector=NixlConnector",
        "kv_transfer_config.kv_role=kv_both",
        "kv_transfer_config.kv_buffer_device=cpu",
    ]
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
            runs.append(await VllmRun.start(tiny_model, *transfer))
    decode, prefill = runs
    tokens = prompt(330)
    await prefill.run_works(work("a", tokens, max_tokens=1, prefill=True))
    handoff = prefill.sink.deltas["a"][-1].handoff
    assert handoff is not None
    assert handoff["do_remote_prefill"]
    await decode.run_works(work("a", tokens, handoff=msgpack_round_trip(handoff)))
    await prefill.run_works(work("whole", tokens))
    assert decode.sink.tokens("a") == prefill.sink.tokens("whole")
    await eventually(lambda: decode.depth(tokens) == 320, what="the fetched blocks are reported")

    for run, role in ((prefill, "decode"), (decode, "prefill")):
        assert isinstance(run.engine, RoleSwitching)
        await run.engine.switch_role(role)
    tokens = prompt(330, first=1000)
    await decode.run_works(work("b", tokens, max_tokens=1, prefill=True))
    handoff = decode.sink.deltas["b"][-1].handoff
    assert handoff is not None
    assert fetched_tokens() == 0
    await prefill.run_works(work("b", tokens, handoff=msgpack_round_trip(handoff)))
    assert fetched_tokens() >= 320, "it is the newest"
    await decode.run_works(work("whole b", tokens))
    assert prefill.sink.tokens("b") == decode.sink.tokens("whole b")
    await eventually(lambda: prefill.depth(tokens) == 320, what="the fetched blocks are reported")
    for run in runs:
        await run.engine.close()


def fetched_tokens() -> float:
    """Prompt tokens whose KV the newest vLLM of this process fetched."""
    name = "vllm:external_prefix_cache_hits_total"
    samples = [s for family in REGISTRY.collect() for s in family.samples if s.name == name]
    return sum(sample.value for sample in samples)


def msgpack_round_trip(value: dict[str, object]) -> object:
    """The value as decoded after a message over the bus."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
