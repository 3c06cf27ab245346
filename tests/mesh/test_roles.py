"""Changes of role: one worker's commands, and `kvmesh fleet role` on real processes under load."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio
from support.api_server import ApiServer
from support.mesh import Mesh
from support.nats import NatsServer
from support.traffic import Traffic, distinct_prompts
from support.wait import PATIENCE_S, eventually
from support.worker import FAST, SLOW, ScriptedFrontend, Workers, prompt, work

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Serve
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.demo import model_dir
from kvmesh.settings.schema import WorkerSettings

STREAMS = 20
ROLES: list[Literal["aggregated", "prefill", "decode"]] = ["prefill", "decode", "aggregated"]


# --- one worker


@pytest_asyncio.fixture
async def directory(bus: Bus, limits: StreamLimits) -> AsyncIterator[Directory]:
    made = Directory(bus, limits)
    await made.open()
    yield made
    await made.close()


def serves(directory: Directory, role: str) -> bool:
    return directory.instances[0].serves == role


async def test_the_card_changes_and_requests_of_every_role_are_served(
    frontend: ScriptedFrontend, workers: Workers, directory: Directory
) -> None:
    await workers.start(FAST)
    started = [card.started for card in directory.instances]
    for role in ROLES:
        reply = await frontend.control("w-1", Serve(serves=role))
        assert (reply.ok, reply.reason) == (True, "")
        await eventually(partial(serves, directory, role))
        assert (await frontend.control("w-1", Serve(serves=role))).ok, "it serves that already"
        first = len(ROLES) * 100 * ROLES.index(role)
        whole = work(f"{role} whole", prompt(40, first))
        prefill = work(f"{role} prefill", prompt(40, first + 1), 1, prefill=True)
        decode = work(f"{role} decode", prompt(40, first + 2), handoff={"tokens": 40})
        for item in (whole, prefill, decode):
            assert (await frontend.dispatch("w-1", item)).status == "accepted"
        assert len(await frontend.done(whole.request)) == 20
        assert len(await frontend.done(decode.request)) == 20
        await frontend.done(prefill.request)
        assert frontend.chunks[prefill.request][-1].handoff == {"tokens": 40}
    assert [card.started for card in directory.instances] == started, "the same process"


async def test_a_running_request_ends_where_it_is(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(SLOW)
    item = work("a", prompt(40), max_tokens=60)
    assert (await frontend.dispatch("w-1", item)).status == "accepted"
    await eventually(lambda: frontend.chunks.get("a"))
    assert frontend.finish("a") is None
    for role in ROLES:
        assert (await frontend.control("w-1", Serve(serves=role))).ok
    assert len(await frontend.done("a")) == 60
    assert frontend.finish("a") == "length"


async def test_a_worker_keeps_its_role_beside_other_changes_of_its_card(
    frontend: ScriptedFrontend, workers: Workers, directory: Directory
) -> None:
    worker = await workers.start(FAST, WorkerSettings(serves="decode"))
    assert (await frontend.control("w-1", Serve(serves="prefill"))).ok
    await worker.node.drain(1)
    await eventually(lambda: directory.instances[0].draining)
    assert directory.instances[0].serves == "prefill"
    refused = await frontend.control("w-1", Serve(serves="decode"))
    assert (refused.ok, refused.reason) == (False, "this worker is leaving")


# --- the whole mesh


@pytest.fixture
def mesh(nats_server: NatsServer, tmp_path: Path) -> Iterator[Mesh]:
    env = {"KVMESH_ROUTER_DISAGG_TOKENS": "100", "KVMESH_MOCK_SPEEDUP": "3"}
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


async def switch(mesh: Mesh, worker: str, role: str, before: str) -> None:
    done = await mesh.command("fleet", "role", worker, role)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == f"{worker}: serves {role}, before {before}\n"


class Prompts:
    """New long prompts, one after the other."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._numbers = count()

    async def is_split(self) -> bool:
        """True if the next prompt is computed by a prefill worker."""
        before = self._mesh.metric("kvmesh_frontend_prefills_total")
        await asyncio.to_thread(self._complete, f"The new question {next(self._numbers)}. " * 40)
        return self._mesh.metric("kvmesh_frontend_prefills_total") > before

    async def is_whole(self) -> bool:
        return not await self.is_split()

    def _complete(self, text: str) -> None:
        body = {"model": "kvmesh-demo", "prompt": text, "max_tokens": 2}
        request = urllib.request.Request(
            f"{self._mesh.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2


async def test_roles_change_under_load_and_no_request_fails(mesh: Mesh) -> None:
    mesh.start_all(workers=2)
    await mesh.ready()
    prompts = Prompts(mesh)
    known = distinct_prompts(each=2, clients=STREAMS)
    async with Traffic(mesh.url, known, clients=STREAMS, tokens=40) as traffic:
        assert await prompts.is_whole()
        await switch(mesh, "worker-0", "prefill", before="aggregated")
        await switch(mesh, "worker-1", "decode", before="aggregated")
        await eventually(prompts.is_split, what="the router splits a long prompt")
        await traffic.wait_for_outputs(2 * STREAMS)

        await switch(mesh, "worker-1", "prefill", before="decode")
        await switch(mesh, "worker-0", "decode", before="prefill")
        await eventually(prompts.is_split, what="the workers have exchanged their roles")
        await traffic.wait_for_outputs(2 * STREAMS)

        await switch(mesh, "worker-0", "aggregated", before="decode")
        await switch(mesh, "worker-1", "aggregated", before="prefill")
        await eventually(prompts.is_whole, what="the router splits no prompt")
        await traffic.wait_for_outputs(2 * STREAMS)
    assert traffic.failed == []
    assert mesh.metric("kvmesh_frontend_prefills_total") >= 2


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    made = ApiServer(tmp_path, "vllm")
    await made.start()
    yield made
    await made.close()


async def test_what_cannot_be_done_is_refused_with_the_reason(
    mesh: Mesh, server: ApiServer
) -> None:
    mesh.start_all(workers=1)
    mesh.start(
        "worker",
        "sidecar",
        KVMESH_WORKER_ENGINE="openai",
        KVMESH_WORKER_MODEL=str(model_dir()),
        KVMESH_WORKER_SERVED_NAME="elsewhere",
        KVMESH_REMOTE_URL=server.url,
        KVMESH_REMOTE_KV_EVENTS=server.publisher.endpoint,
        KVMESH_REMOTE_KV_REPLAY=server.publisher.replay,
    )
    await mesh.ready()

    async def refused() -> str:
        done = await mesh.command("fleet", "role", "sidecar", "prefill")
        assert done.returncode == 1, done
        return done.stderr if "is called" not in done.stderr else ""

    reason = await eventually(refused, what="the sidecar has joined")
    assert reason == "sidecar: the openai engine, as configured, cannot serve prefill\n"
    assert (await mesh.command("fleet", "role", "sidecar", "aggregated")).returncode == 0, (
        "it does already"
    )
    unknown = await mesh.command("fleet", "role", "worker-1", "prefill")
    assert unknown.returncode == 1
    assert "no worker is called worker-1; did you mean worker-0?" in unknown.stderr
    other = await mesh.command("fleet", "role", "worker-0", "prefill", "--model", "elsewhere")
    assert (other.returncode, "no worker is called worker-0" in other.stderr) == (1, True)
    assert (await mesh.command("fleet", "role", "worker-0", "both")).returncode == 2
