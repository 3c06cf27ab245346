"""The torch engine beyond the engine contract."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from msgspec.structs import replace
from support.recorder import Recorder
from support.tiny import tiny_model
from support.torch_core import BLOCK, make_work
from support.wait import eventually

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.settings import Settings
from kvmesh.settings.schema import TorchSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, Rejected
from kvmesh.worker.engines.torch.engine import TorchEngine
from kvmesh.worker.engines.torch.model.paged_model import PagedModel


async def started(folder: Path, **options: object) -> tuple[TorchEngine, Recorder]:
    section = replace(TorchSettings(blocks=64, threads=1), **options)
    settings = Settings(torch=section, worker=WorkerSettings(engine="torch", block_size=BLOCK))
    engine, sink = TorchEngine(EngineContext(settings, folder)), Recorder()
    await engine.start(sink)
    return engine, sink


async def test_a_constraint_is_followed_and_bad_requests_are_rejected() -> None:
    engine, sink = await started(tiny_model())
    guided = Guided(kind="regex", value="[0-9]{3}")
    engine.submit(make_work("a", [5, 6, 7], 50, guided=guided, ignore_eos=False))
    await eventually(lambda: sink.finish("a"), timeout=60)
    assert sink.finish("a") == "stop"
    with pytest.raises(Rejected, match="unclosed"):
        engine.submit(make_work("b", [5], guided=Guided(kind="regex", value="(")))
    with pytest.raises(Rejected, match="empty"):
        engine.submit(make_work("c", []))
    with pytest.raises(Rejected, match="vocabulary"):
        engine.submit(make_work("c", [9000]))
    await engine.close()


async def test_a_model_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sink = await started(tiny_model())

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(PagedModel, "forward", fail)
    engine.submit(make_work("a", [5, 6, 7]))
    await eventually(lambda: sink.errors, timeout=60)
    assert "the torch engine died: RuntimeError: out of order" in str(sink.errors[0])
    await engine.close()


async def test_impossible_options_fail_the_start() -> None:
    with pytest.raises(EngineError, match="holds no block"):
        await started(tiny_model(), blocks=0, kv_bytes=100)
    with pytest.raises(EngineError, match="unknown device"):
        await started(tiny_model(), device="nonesuch")


async def test_a_seeded_answer_is_the_same_in_any_batch() -> None:
    engine, sink = await started(tiny_model())
    sampling = Sampling(max_tokens=20, seed=11, top_p=0.9, ignore_eos=True)
    engine.submit(replace(make_work("alone", list(range(30))), sampling=sampling))
    await eventually(lambda: sink.finish("alone"), timeout=60)
    for i in range(4):
        engine.submit(make_work(f"other{i}", list(range(i, 50)), 30))
    engine.submit(replace(make_work("again", list(range(30))), sampling=sampling))
    await eventually(lambda: sink.finish("again"), timeout=60)
    assert sink.tokens("again") == sink.tokens("alone")
    await engine.close()
