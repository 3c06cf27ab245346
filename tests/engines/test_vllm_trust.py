"""Two real vLLM behind one mesh: hostile tenants, and frozen or killed engines.

Both workers have the same random weights, so an answer is the same wherever it is made.
"""

import asyncio
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.mesh import Mesh
from support.nats import NatsServer
from support.tenants import EVIL, FORGED, VICTIM
from support.traffic import Traffic, distinct_prompts
from support.trials import is_running, trial_process
from support.wait import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
psutil = pytest.importorskip("psutil")
ARGS = "enforce_eager=true,num_gpu_blocks_override=160,max_model_len=1024,dtype=float32"
MODEL, SIZE = "kvmesh-demo", 32
START_S = 400.0
LEASE_S = 5.0
PAUSE_S = LEASE_S + 2.0  # what a client may notice of a worker
SLACK_S = 4.0  # for machines on which everything is slow
CLIENTS, TOKENS = 4, 24
KEYS: dict[str, dict[str, Any]] = {
    "victim": {"tenant": VICTIM, "scopes": ["routing"]},
    "evil": {"tenant": EVIL, "scopes": ["cache", "routing"]},
    "operator": {"scopes": ["cache", "admin"]},
    "none": {},  # of `Traffic`
}


@pytest.fixture(scope="module")
def mesh(
    nats_server: NatsServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("trust")
    keys = folder / "keys.toml"
    keys.write_text("".join(_entry(name, **fields) for name, fields in KEYS.items()))
    env = {
        "KVMESH_FRONTEND_KEYS_FILE": str(keys),
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_SERVED_NAME": MODEL,
        "KVMESH_WORKER_MODEL": str(tiny_model),
        "KVMESH_WORKER_BLOCK_SIZE": str(SIZE),
        "KVMESH_VLLM_ARGS": ARGS,
        "KVMESH_STREAMS_LEASE_S": str(LEASE_S),
        "KVMESH_WORKER_COMPILE_TIMEOUT_S": "4",
        "KVMESH_ROUTER_PREDICTED_TTL_S": "0",
    }
    made = Mesh(nats_server.url, folder, env)
    made.start_all(workers=2)
    yield made
    made.stop()


def _entry(name: str, **fields: Any) -> str:
    row = {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **fields}
    return "[[key]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items())


@asynccontextmanager
async def traffic(mesh: Mesh) -> AsyncIterator[Traffic]:
    """Endless streams; assert at the end that none failed, was wrong, or paused too long."""
    clients = Traffic(mesh.url, distinct_prompts(1, CLIENTS), CLIENTS, TOKENS)
    await clients.start()
    try:
        await clients.wait_for_outputs(CLIENTS)
        yield clients
    finally:
        await clients.stop()
        print(f"{clients.completed} answers, longest pause {clients.longest_pause:.2f} s")
        assert clients.failed == []
    assert clients.longest_pause <= PAUSE_S + SLACK_S


async def serving(mesh: Mesh, count: int = 2) -> None:
    """Wait until `count` workers serve."""
    await mesh.ready(START_S)
    await eventually(lambda: mesh.live_workers() == count, timeout=START_S, what=f"{count} serve")


def core(mesh: Mesh, worker: str) -> Any:
    """The process in which this worker's vLLM computes."""
    children = psutil.Process(mesh.processes[worker].pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in child.name())


def post(mesh: Mesh, key: str, path: str, body: dict[str, Any], **headers: str) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    data = json.dumps({"model": MODEL, **body}).encode()
    request = urllib.request.Request(mesh.url + path, data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def cached(mesh: Mesh, key: str, text: str, **headers: str) -> int:
    """Request one token; returns the prompt's cached tokens."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    usage = post(mesh, key, "/v1/chat/completions", body, **headers)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def generate_constrained(mesh: Mesh, key: str, schema: dict[str, Any]) -> str:
    """The answer to a request with this constraint, or its error's status and body."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 24}
    body["reasoning_effort"] = "none"  # a model of random weights would think to the end
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    try:
        answer = post(mesh, key, "/v1/chat/completions", {**body, "response_format": wanted})
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"
    return str(answer["choices"][0]["message"]["content"]).strip()  # JSON may have space around it


async def test_a_tenant_neither_hits_nor_clears_blocks_of_another(mesh: Mesh) -> None:
    await serving(mesh)
    text = "What nobody else may know of the victim. " * 20

    def instances() -> list[str]:
        """Those named in the log, where the line follows the lease."""
        return re.findall(r" as (worker-0-[0-9a-f]+)$", mesh.logs(), re.MULTILINE)

    instance = (await eventually(instances))[-1]
    placed = {"x-kvmesh-worker-instance-id": instance}

    def cached_tokens(key: str, **headers: str) -> int:
        return cached(mesh, key, text, **placed, **headers)

    def is_cached(key: str, **headers: str) -> bool:
        return cached_tokens(key, **headers) >= 4 * SIZE

    assert cached_tokens("victim") == 0
    await eventually(lambda: is_cached("victim"))
    for claim in (FORGED, VICTIM, f"{EVIL}/{VICTIM}"):
        assert cached_tokens("evil", **{"x-tenant-id": claim}) == 0
        assert cached_tokens("operator", **{"x-tenant-id": claim}) == 0
    assert cached_tokens("evil") == cached_tokens("operator") == 0
    part = {"x-tenant-id": "part"}
    assert cached_tokens("victim", **part) == 0
    await eventually(lambda: is_cached("victim", **part))
    forged = {"x-tenant-id": FORGED}
    await eventually(lambda: is_cached("evil", **forged))
    reply = post(mesh, "evil", "/v1/cache/clear", {}, **forged)
    assert all(worker["ok"] for worker in reply["instances"])
    assert reply["blocks"] >= 4
    assert cached_tokens("evil", **forged) == 0
    assert is_cached("victim")
    assert is_cached("victim", **part)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        post(mesh, "evil", "/v1/cache/clear", {"all_tenants": True})
    assert is_cached("victim")
    post(mesh, "operator", "/v1/cache/clear", {"all_tenants": True})
    await eventually(lambda: cached_tokens("victim") == 0)


async def test_incompatible_workers_are_refused_in_one_line(
    mesh: Mesh, tiny_model: Path, tmp_path: Path
) -> None:
    await serving(mesh)
    other = tmp_path / "model"
    shutil.copytree(tiny_model, other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()), indent=1))
    misfits = {
        "block size": {"KVMESH_WORKER_BLOCK_SIZE": str(2 * SIZE)},
        "tokenizer": {"KVMESH_WORKER_MODEL": str(other)},
        "KV layout": {"KVMESH_VLLM_ARGS": ARGS.replace("float32", "bfloat16")},
    }
    for number, settings in enumerate(misfits.values()):
        mesh.start("worker", f"misfit-{number}", **settings)
    for number, fact in enumerate(misfits):
        process = mesh.processes[f"misfit-{number}"]
        await eventually(lambda: process.poll() is not None, timeout=START_S)  # noqa: B023
        del mesh.processes[f"misfit-{number}"]
        assert process.returncode == 2
        log = (mesh.folder / f"misfit-{number}.log").read_text()
        [line] = [line for line in log.splitlines() if "not joining" in line]
        assert f"misfit-{number}: {fact} " in line
        assert "of worker-0, worker-1" in line or "of worker-1, worker-0" in line
    assert mesh.live_workers() == 2


async def test_slow_constraints_are_rejected_and_delay_no_other_request(
    mesh: Mesh,
) -> None:
    await serving(mesh)
    slow_to_read = "|".join(f"[a-z]{{{n},{n + 50}}}x.*" for n in range(1, 300))
    slow_to_compile = {f"k{number}": {"type": "string"} for number in range(3000)}
    hostile: list[dict[str, Any]] = [
        {"type": "string", "pattern": f"({slow_to_read})"},
        {"type": "object", "properties": slow_to_compile, "additionalProperties": False},
    ]

    async with traffic(mesh) as clients:
        before = clients.completed
        attacks = [
            asyncio.to_thread(generate_constrained, mesh, "evil", schema) for schema in hostile
        ]
        attacked = asyncio.gather(*attacks)
        assert (
            await asyncio.to_thread(generate_constrained, mesh, "victim", {"enum": ["yes"]})
            == '"yes"'
        )
        for refusal in await attacked:
            assert refusal.startswith("400: ")
            assert "takes" in refusal
        await clients.wait_for_outputs(CLIENTS)
        assert clients.completed > before
        assert clients.longest_pause <= PAUSE_S


async def test_constraints_are_tried_despite_frozen_trial_processes(
    mesh: Mesh,
) -> None:
    """Importing vLLM anew takes longer than a constraint may take."""
    await serving(mesh)
    await eventually(lambda: mesh.logs().count("trial process is ready") >= 2, timeout=60)
    workers = [mesh.processes[name].pid for name in ("worker-0", "worker-1")]
    frozen = [trial_process(worker) for worker in workers]
    for process in frozen:
        os.kill(process, signal.SIGSTOP)
    for number in itertools.count():
        answer = await asyncio.to_thread(
            generate_constrained, mesh, "victim", {"enum": [f"w{number}"]}
        )
        assert answer == f'"w{number}"'
        if not any(is_running(process) for process in frozen):
            break


async def test_streams_of_a_frozen_worker_migrate_and_it_stays_fenced_afterwards(
    mesh: Mesh,
) -> None:
    await serving(mesh)
    async with traffic(mesh) as clients:
        process = mesh.processes["worker-0"]
        process.send_signal(signal.SIGSTOP)
        try:
            await eventually(lambda: mesh.live_workers() == 1, what="its lease has ended")
            await clients.wait_for_outputs(CLIENTS)
        finally:
            process.send_signal(signal.SIGCONT)
        await serving(mesh)
        await eventually(lambda: "other processes considered this one dead" in mesh.logs())
        await clients.wait_for_outputs(CLIENTS)
    await eventually(
        lambda: not mesh.metric("kvmesh_worker_running_requests"), what="nothing runs for nobody"
    )


async def test_streams_of_a_stopped_or_killed_engine_migrate_and_its_worker_leaves(
    mesh: Mesh,
) -> None:
    await serving(mesh)
    async with traffic(mesh) as clients:
        stopped, process = core(mesh, "worker-0"), mesh.processes["worker-0"]
        stopped.suspend()
        await eventually(lambda: process.poll() is not None, what="its worker has left")
        assert process.returncode == 1
        assert "vLLM has been stopped" in (mesh.folder / "worker-0.log").read_text()
        await eventually(lambda: not stopped.is_running(), what="the engine has ended with it")
        await clients.wait_for_outputs(CLIENTS)
        mesh.restart("worker-0")
        await serving(mesh)
        process = mesh.processes["worker-1"]
        core(mesh, "worker-1").kill()
        await eventually(lambda: process.poll() is not None, what="its worker has left")
        assert process.returncode == 1
        assert "vLLM has died" in (mesh.folder / "worker-1.log").read_text()
        await clients.wait_for_outputs(CLIENTS)
