"""Sleep of a real vLLM: refused where the platform has none, and what the worker does around it.

Without a GPU vLLM refuses to sleep. With that refusal lifted, its CPU worker frees nothing, but
all else is vLLM's own: the paused scheduler, the dropped cache, its events, and the wake.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.recorder import Recorder
from support.vllm import ARGS, VllmRun, prompt, sequence, work

from kvmesh.settings import Settings
from kvmesh.settings.schema import VllmSettings, WorkerSettings
from kvmesh.worker.capabilities import sleep_problem
from kvmesh.worker.engine import EngineConfigError, EngineContext, create_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


async def test_vllm_refuses_to_sleep_without_a_gpu_and_so_does_the_worker(
    tiny_model: Path,
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if current_platform.is_sleep_mode_available():
        pytest.skip("this platform has a sleep mode")
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        AsyncEngineArgs(model=str(tiny_model), enable_sleep_mode=True).create_engine_config()
    vllm = VllmSettings(args=[*ARGS, "enable_sleep_mode=true"])
    settings = Settings(vllm=vllm, worker=WorkerSettings(engine="vllm", block_size=32))
    with pytest.raises(EngineConfigError, match="no sleep mode on this platform: remove"):
        create_engine(EngineContext(settings, tiny_model))
    plain = Settings(vllm=VllmSettings(args=ARGS), worker=settings.worker)
    engine = create_engine(EngineContext(plain, tiny_model))
    assert "without enable_sleep_mode" in sleep_problem(engine, "vllm")


async def test_a_vllm_that_slept_answers_as_before_with_an_empty_cache(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda _: True)
    run = await VllmRun.start(tiny_model, "enable_sleep_mode=true")
    engine: Any = run.engine
    assert sleep_problem(engine, "vllm") == ""
    assert engine.cannot_sleep() == ""
    try:
        await run.run_works(work("before", prompt(200)))
        await run.wait_for_events()
        assert run.depth(prompt(200)) == 192
        for number in range(2):
            await engine.drain()
            await engine.sleep()
            assert await engine._llm.is_sleeping()
            lost = asyncio.create_task(engine.lost())
            await asyncio.sleep(0)
            assert not lost.done()
            lost.cancel()
            old, run.sink = run.sink, Recorder()
            info = await engine.start(run.sink)
            assert info == run.info
            assert not await engine._llm.is_sleeping()
            await run.run_works(work(f"after{number}", prompt(200)))
            assert run.sink.tokens(f"after{number}") == old.tokens(
                "before" if not number else f"after{number - 1}"
            )
            assert run.sink.cached(f"after{number}") == 0, "its cache is gone"
            await run.wait_for_events()
            assert set(sequence(prompt(200))) <= run.held_hashes
            assert run.load().running == 0
    finally:
        await engine.close()
