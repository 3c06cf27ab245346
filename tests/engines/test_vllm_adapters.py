"""vLLM with LoRA adapters: of its settings, and loaded, replaced and unloaded while it runs."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.vllm import PLAIN, VllmRun, prompt, work
from support.wait import eventually

from kvmesh.bus.messages import ControlReply, LoadAdapter, UnloadAdapter, Work
from kvmesh.hashing import salt
from kvmesh.settings.schema import VllmSettings
from kvmesh.worker.capabilities import AdapterLoading
from kvmesh.worker.engine import EngineConfigError, Rejected
from kvmesh.worker.lora.manager import AdapterManager

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
PROMPT = prompt(80)


class Adapters:
    """A vLLM and a manager of its adapters."""

    def __init__(self, run: VllmRun, max_adapters: int, retire_s: float = 0.1) -> None:
        self.run = run
        self.listed: list[str] = run.info.adapters
        self.manager = AdapterManager(
            run.engine, "vllm", max_adapters, lambda _: 0, self.publish, retire_s
        )
        self.manager.open("tiny", run.info.adapters)

    async def publish(self, identities: list[str]) -> None:
        self.listed = identities

    async def load(self, name: str, folder: Path) -> ControlReply:
        return await self.manager.execute(LoadAdapter(name=name, folder=str(folder)))

    async def unload(self, name: str) -> ControlReply:
        return await self.manager.execute(UnloadAdapter(name=name))

    async def answer(self, request: str, adapter: str = "", tokens: bytes = PROMPT) -> list[int]:
        await self.run.run_works(request_of(request, adapter, tokens))
        return self.run.sink.tokens(request)

    async def close(self) -> None:
        """Unload all, and close the manager."""
        await self.manager.close()
        assert isinstance(self.run.engine, AdapterLoading)
        for identity in loaded(self.run):
            await self.run.engine.unload_adapter(identity)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path) -> AsyncIterator[VllmRun]:
    run = await VllmRun.start(tiny_model, max_adapters=2)
    yield run
    await run.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> VllmRun:
    """The shared engine with a fresh record."""
    await asyncio.wait_for(shared.engine.drain(), 60)
    shared.sink.deltas.clear()
    return shared


def request_of(request: str, adapter: str, tokens: bytes = PROMPT) -> Work:
    plain = salt("tiny", adapter)
    return work(request, tokens, adapter=adapter or None, salt=plain)


def make_adapter(folder: Path, seed: int = 1) -> Path:
    from support import lora

    return lora.make_adapter(folder, seed)


async def test_an_adapter_has_its_own_output_and_blocks(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "poet")
    run = await VllmRun.start(tiny_model, vllm=VllmSettings(adapters=[f"poet={folder}"]))
    (poet,) = run.info.adapters
    assert poet.startswith("poet@")
    salt_ = PLAIN + 1
    await run.run_works(work("plain", PROMPT))
    await run.run_works(work("adapted", PROMPT, adapter=poet, salt=salt_))
    assert run.sink.tokens("adapted") != run.sink.tokens("plain")
    assert run.sink.cached("adapted") == 0
    await run.run_works(work("again", PROMPT, adapter=poet, salt=salt_))
    assert run.sink.cached("again") == 64
    assert run.sink.tokens("again") == run.sink.tokens("adapted")
    with pytest.raises(Rejected, match="no adapter critic"):
        run.engine.submit(work("other", PROMPT, adapter="critic"))
    adapters = Adapters(run, 0)
    reply = await adapters.load("critic", folder)
    assert not reply.ok
    assert "worker.max_adapters" in reply.reason
    await adapters.manager.close()
    await run.engine.close()


async def test_adapters_change_while_vllm_runs(started: VllmRun, tmp_path: Path) -> None:
    run, adapters = started, Adapters(started, 2)
    plain = await adapters.answer("plain")
    folder = make_adapter(tmp_path / "poet", seed=1)
    first = await adapters.load("poet", folder)
    assert first.ok, first.reason
    assert adapters.listed == [first.adapter]
    one = await adapters.answer("one", first.adapter)
    assert one != plain
    await adapters.answer("cached", first.adapter)
    assert run.sink.cached("cached") == 64

    await refuses_bad_folders(adapters, tmp_path)

    shutil.rmtree(folder)  # vLLM must not read it again
    second = await adapters.load("poet", make_adapter(folder, seed=2))
    assert second.ok
    assert second.adapter != first.adapter
    assert adapters.listed == [second.adapter, first.adapter]
    two = await adapters.answer("two", second.adapter)
    assert two != one
    assert run.sink.cached("two") == 0
    await eventually(lambda: adapters.listed == [second.adapter], what="the first one has left")
    await eventually(lambda: first.adapter not in loaded(run), what="vLLM has unloaded it")
    third = await adapters.load("critic", make_adapter(tmp_path / "critic", seed=3))
    assert third.ok, third.reason
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "critic")
    assert await adapters.answer("two again", second.adapter, PROMPT) == two
    await adapters.answer("three", third.adapter)

    assert (await adapters.unload("poet")).ok
    assert adapters.listed == [third.adapter]
    with pytest.raises(Rejected, match="no adapter poet@"):
        run.engine.submit(request_of("late", second.adapter))
    reply = await adapters.unload("poet")
    assert (reply.ok, reply.reason) == (False, "there is no adapter poet")
    assert await adapters.answer("plain again", tokens=PROMPT) == plain
    await adapters.close()


async def refuses_bad_folders(adapters: Adapters, tmp_path: Path) -> None:
    """Each is refused, by the check of the folder or by vLLM, and vLLM lives."""
    import torch
    from safetensors.torch import save_file

    misnamed = make_adapter(tmp_path / "misnamed")
    weights = {"base_model.model.model.layers.0.ghost.lora_A.weight": torch.zeros(8, 64)}
    save_file(weights, misnamed / "adapter_model.safetensors")
    torn = make_adapter(tmp_path / "torn")
    (torn / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    wide = make_adapter(tmp_path / "wide")
    config = (wide / "adapter_config.json").read_text().replace('"r": 8', '"r": 64')
    (wide / "adapter_config.json").write_text(config)
    for folder, reason in (
        (tmp_path / "nowhere", "is not a folder"),
        (torn, "not a safetensors file"),
        (wide, "rank 64; the engine accepts at most 16"),
        (misnamed, "vLLM refuses the adapter"),
    ):
        reply = await adapters.load("bad", folder)
        assert not reply.ok
        assert reason in reply.reason
    assert await adapters.answer("lives", tokens=prompt(40))


async def test_a_request_without_an_adapter_is_right_beside_others(
    started: VllmRun, tmp_path: Path
) -> None:
    """vLLM on a CPU computes it with the adapter in the last slot, unless that slot is empty."""
    run, adapters = started, Adapters(started, 2, retire_s=60)  # three are loaded
    replies = [
        await adapters.load(name, make_adapter(tmp_path / name, seed))
        for seed, name in enumerate(("one", "two"), 1)
    ]
    replies.append(await adapters.load("one", make_adapter(tmp_path / "three", 3)))
    identities = [reply.adapter for reply in replies]
    assert len(set(adapters.listed) & set(identities)) == 3
    tokens = [prompt(40, first) for first in (1, 2, 3)]
    alone = [await adapters.answer(f"alone{i}", tokens=each) for i, each in enumerate(tokens)]
    for round_ in range(2):
        beside = [request_of(f"{round_}beside{i}", "", each) for i, each in enumerate(tokens)]
        others = [
            request_of(f"{round_}other{i}", identity, prompt(50, 7 + round_))
            for i, identity in enumerate(identities)
        ]
        await run.run_works(*others, *beside)
        found = [run.sink.tokens(item.request) for item in beside]
        assert found == alone
    await adapters.close()


async def test_unloading_waits_for_the_last_step(started: VllmRun, tmp_path: Path) -> None:
    run, adapters = started, Adapters(started, 2)
    reply = await adapters.load("poet", make_adapter(tmp_path / "poet"))
    run.engine.submit(work("long", PROMPT, 300, adapter=reply.adapter, salt=PLAIN))
    await run.wait_for_tokens("long")
    unloading = asyncio.create_task(adapters.unload("poet"))
    await eventually(lambda: adapters.listed == [], what="off the card")
    assert not unloading.done()
    run.engine.abort("long")
    assert (await unloading).ok
    await adapters.answer("after", tokens=prompt(40))
    await adapters.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [("max_loras=2", "max_loras is 2; on a CPU it must be at least 4"), ("", "is not a folder")],
)
async def test_settings_that_cannot_work_are_refused_at_the_start(
    tiny_model: Path, tmp_path: Path, arguments: str, reason: str
) -> None:
    vllm = VllmSettings(adapters=[] if arguments else [f"poet={tmp_path / 'nowhere'}"])
    more = [arguments] if arguments else []
    with pytest.raises(EngineConfigError, match=reason):
        await VllmRun.start(tiny_model, *more, vllm=vllm, max_adapters=2)


def loaded(run: VllmRun) -> list[str]:
    return list(run.engine._adapters.identities)  # type: ignore[attr-defined]
