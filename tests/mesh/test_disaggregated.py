"""Prefill and decode on different workers, through the whole mesh: HTTP in, tokens out."""

import asyncio
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear, ControlReply, MessageDecoder, instance_number
from kvmesh.demo import model_dir

LONG = "Each worker tells what it keeps, and a prompt goes where most of it is kept already. " * 8
SHORT = "Which worker keeps the most of this?"


@pytest.fixture
def mesh(nats_server: NatsServer, tmp_path: Path) -> Iterator[Mesh]:
    mesh = Mesh(
        nats_server.url,
        tmp_path,
        env={"KVMESH_ROUTER_DISAGG_TOKENS": "100", "KVMESH_MOCK_SPEEDUP": "5"},
    )
    yield mesh
    mesh.stop()


def begin(mesh: Mesh, path: str | None = None, **prefill: str) -> None:
    """Start one prefill and one decode worker; the keywords apply to the prefill worker only."""
    both = {} if path is None else {"PYTHONPATH": path}
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    mesh.start("worker", "prefill-0", KVMESH_WORKER_SERVES="prefill", **both, **prefill)
    mesh.start("worker", "decode-0", KVMESH_WORKER_SERVES="decode", **both)
    mesh.start("frontend", "frontend-0")


async def complete(
    mesh: Mesh, prompt: str, model: str = "kvmesh-demo", tokens: int = 12, **fields: Any
) -> Any:
    def post() -> Any:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= fields
        request = urllib.request.Request(
            f"{mesh.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    return await asyncio.to_thread(post)


def text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def prefills(mesh: Mesh, result: str) -> float:
    samples = mesh.metrics().items()
    return sum(v for k, v in samples if "prefills_total" in k and f'result="{result}"' in k)


def loaded(mesh: Mesh, worker: str) -> bool:
    """True if the worker reports prompts to compute."""
    samples = mesh.worker_metrics().items()
    return any(v for k, v in samples if "worker_prefill_tokens{" in k and f'"{worker}"' in k)


def instance(mesh: Mesh, worker: str) -> str:
    return str(re.findall(f" as ({worker}-[0-9a-f]+)$", mesh.logs(), re.MULTILINE)[-1])


async def workers(mesh: Mesh, count: int) -> None:
    """Wait until the frontend sees `count` workers."""
    await eventually(lambda: mesh.live_workers() == count, what=f"{count} workers serve")


async def test_only_long_prompts_are_prefilled_on_the_prefill_worker(mesh: Mesh) -> None:
    begin(mesh)
    await mesh.ready()
    await workers(mesh, 2)
    first = await complete(mesh, LONG)
    assert prefills(mesh, "done") == 1
    assert cached(first) == 0
    again = await complete(mesh, LONG)
    assert text(again) == text(first)
    assert cached(again) > 100
    await complete(mesh, SHORT)
    assert prefills(mesh, "done") == 1
    assert mesh.metric("kvmesh_frontend_prefills_total") == 1


async def test_a_request_names_the_worker_that_computes_its_prompt(mesh: Mesh) -> None:
    begin(mesh)
    mesh.start("worker", "prefill-1", KVMESH_WORKER_SERVES="prefill")
    await mesh.ready()
    await workers(mesh, 3)
    decode = instance(mesh, "decode-0")
    for number in (0, 1):
        name = instance(mesh, f"prefill-{number}")
        for wanted in (name, instance_number(name)):  # by both of its names, and however short
            nvext = {"prefill_worker_id": wanted, "extra_fields": ["worker_id"]}
            answer = await complete(mesh, f"{wanted}? {SHORT}", nvext=nvext)
            told = answer["nvext"]["worker_id"]
            assert told["prefill_worker_id"] == instance_number(name)
            assert told["instance"] == decode
    assert prefills(mesh, "done") == 4
    with pytest.raises(urllib.error.HTTPError) as refused:
        await complete(mesh, SHORT, nvext={"prefill_worker_id": decode})
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "nvext.prefill_worker_id"), error


async def test_no_request_is_lost_when_the_prefill_worker_is_killed(mesh: Mesh) -> None:
    # a step computes one prompt, so that others wait, however they arrive
    begin(mesh, KVMESH_MOCK_SPEEDUP="0.005", KVMESH_MOCK_MAX_BATCHED_TOKENS="256")
    await mesh.ready()
    await workers(mesh, 2)
    pending = [asyncio.create_task(complete(mesh, f"{i} {LONG}", tokens=2)) for i in range(6)]

    await eventually(lambda: loaded(mesh, "prefill-0"), what="prompts have arrived")
    mesh.kill("prefill-0")
    answers = await asyncio.gather(*pending)
    assert all(answer["usage"]["completion_tokens"] == 2 for answer in answers)
    lost = sum(prefills(mesh, result) for result in ("lost", "gone", "silent", "absent"))
    assert lost + prefills(mesh, "done") == mesh.metric("kvmesh_frontend_prefills_total")
    assert lost
    assert "did not compute the prompt of" in mesh.logs()
    assert text(await complete(mesh, f"one more {LONG}"))


async def test_a_hanging_prefill_worker_costs_at_most_its_timeout(mesh: Mesh) -> None:
    mesh.env["KVMESH_FRONTEND_PREFILL_TIMEOUT_S"] = "0.3"
    begin(mesh, KVMESH_MOCK_HANG_STEP="1")
    await mesh.ready()
    await workers(mesh, 2)
    assert text(await complete(mesh, LONG))
    assert prefills(mesh, "timeout") == 1
    assert mesh.logs().count("did not compute the prompt of") == 1
    mesh.kill("prefill-0")


async def test_a_real_model_has_the_same_output_with_kv_of_another_worker(
    mesh: Mesh, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
    from kvmesh.worker.models.tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "tiny")
    mesh.env |= {
        "KVMESH_WORKER_ENGINE": "torch",
        "KVMESH_WORKER_MODEL": str(tmp_path / "tiny"),
        "KVMESH_TORCH_THREADS": "1",
        "KVMESH_TORCH_BLOCKS": "256",
    }
    begin(mesh)
    await mesh.ready()
    await workers(mesh, 2)
    apart = await complete(mesh, LONG, "tiny")
    assert prefills(mesh, "done") == 1
    assert cached(apart) == 0
    assert "computed again" not in mesh.logs()
    bus = await Bus.connect(mesh.options, "test")
    decoder = instance(mesh, "decode-0")
    await bus.request(bus.subjects.ctl(decoder), Clear(), MessageDecoder(ControlReply), PATIENCE_S)
    await bus.close()
    mesh.kill("prefill-0")
    await workers(mesh, 1)
    alone = await complete(mesh, LONG, "tiny")
    assert cached(alone) == 0
    assert text(alone) == text(apart)
    assert mesh.metric("kvmesh_frontend_prefills_total") == 1


SGLANG_MODULES = {
    "sglang/__init__.py": "from support.sglang_standin import Engine, __version__",
    "sglang/srt/__init__.py": "",
    "sglang/srt/managers/__init__.py": "",
    "sglang/srt/managers/io_struct.py": "from support.sglang_standin import CloseSessionReqInput",
}


@pytest.fixture
def sglang(mesh: Mesh, tmp_path: Path) -> str:
    """The path of workers of the mesh that import SGLang's stand-in under SGLang's name."""
    packages = tmp_path / "packages"
    for name, source in SGLANG_MODULES.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(source)
    path = (str(packages), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", ""))
    mesh.env |= {
        "KVMESH_WORKER_ENGINE": "sglang",
        "KVMESH_SGLANG_ARGS": "load_format=dummy",
        "KVMESH_WORKER_MODEL": str(model_dir()),
    }
    return os.pathsep.join(path)


async def test_sglang_hands_off_every_prompt(mesh: Mesh, sglang: str) -> None:
    begin(mesh, sglang)
    await mesh.ready()
    await workers(mesh, 2)
    for count, prompt in enumerate((LONG[:1500], SHORT), start=1):
        answer = await complete(mesh, prompt)
        assert answer["usage"]["completion_tokens"] == 12
        assert prefills(mesh, "done") == count
    assert "did not compute the prompt of" not in mesh.logs()


async def test_sglang_waits_for_a_prefill_worker(mesh: Mesh, sglang: str) -> None:
    mesh.env["KVMESH_FRONTEND_RESTART_WAIT_S"] = str(PATIENCE_S)
    begin(mesh, sglang)
    await mesh.ready()
    await workers(mesh, 2)
    first = await complete(mesh, SHORT)
    mesh.kill("prefill-0")
    waiting = asyncio.create_task(complete(mesh, SHORT))
    mesh.restart("prefill-0")
    assert text(await waiting) == text(first)
