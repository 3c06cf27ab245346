"""Phases of the start of a real vLLM, which compiles for the first time."""

import asyncio
import logging
from pathlib import Path
from time import monotonic

import pytest
from support.recorder import Recorder
from support.vllm import ARGS, SIZE, VllmRun, prompt, work

from kvmesh.bus.messages import StartPhase
from kvmesh.settings import Settings
from kvmesh.settings.schema import VllmSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, begin_processes, create_engine
from kvmesh.worker.engines.vllm.fork_servers.servers import LAUNCHER
from kvmesh.worker.start.timeline import StartTimeline

psutil = pytest.importorskip("psutil")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
OF_VLLM = [
    *("imports", "configuration", "weights", "post-processing", "KV allocation", "compile"),
    *("warm-up", "engine"),
]


async def test_the_phases_of_all_its_processes_add_up_to_the_start(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    caplog.set_level(logging.INFO)
    vllm = VllmSettings(args=[*ARGS, "enforce_eager=false"])
    settings = Settings(vllm=vllm, worker=WorkerSettings(engine="vllm", block_size=SIZE))
    timeline = StartTimeline()
    seen: list[str] = []
    timeline.on_change = lambda: seen.append((timeline.present() or ("",))[0])
    engine = await asyncio.to_thread(
        create_engine, EngineContext(settings, tiny_model, None, timeline)
    )
    began = monotonic()
    with timeline.phase(StartPhase.ENGINE, outer=True):
        await engine.start(Recorder())
    took = monotonic() - began
    await engine.close()
    row = {phase.name: phase.seconds for phase in timeline.row()}
    print({name: round(seconds, 1) for name, seconds in row.items()}, round(took, 1))
    assert list(row) == OF_VLLM
    assert sum(row.values()) == pytest.approx(took, abs=0.1)
    stretches = timeline.stretches()
    imports = [each for each in stretches if each.phase == StartPhase.IMPORTS]
    assert len(imports) >= 2, "of the engine core, then of its worker"
    assert all(each.ended - each.began > 0.5 for each in imports)
    order = [each.phase for each in stretches]
    assert order.index("weights") < order.index("post-processing") < order.index("compile")
    assert order.index("compile") < order.index("warm-up") < order.index("KV allocation")
    assert row["compile"] > row["warm-up"]
    assert {"configuration", "imports", "weights", "compile", "KV allocation"} <= set(seen)
    assert "told no times" not in caplog.text


async def test_the_second_start_forks_its_processes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    settings = Settings(
        vllm=VllmSettings(args=ARGS), worker=WorkerSettings(engine="vllm", block_size=SIZE)
    )
    outputs, imports, forks = [], [], []
    for _ in range(2):
        timeline, sink = StartTimeline(), Recorder()
        context = EngineContext(settings, tiny_model, None, timeline, compiled=tmp_path)
        context = await asyncio.to_thread(begin_processes, context)
        engine = await asyncio.to_thread(create_engine, context)
        run = VllmRun(engine, await engine.start(sink), sink)
        await run.run_works(work("a", prompt(40)))
        outputs.append(sink.tokens("a"))
        imports.append(sum(each.seconds for each in timeline.row() if each.name == "imports"))
        forks.append(launchers())
        await engine.close()
    print([round(seconds, 1) for seconds in imports])
    assert outputs[0] == outputs[1]
    assert forks == [0, 2], "the engine core and its worker"


def launchers() -> int:
    """The number of processes below this one for which a fork server has made another one."""
    return sum(
        any(LAUNCHER in part for part in process.cmdline())
        for process in psutil.Process().children(recursive=True)
    )
