"""LoRA adapters that travel between workers, and that routers have loaded where they are wanted."""

import asyncio
import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.adapter_cards import AdapterCards
from support.adapter_folder import write_adapter
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually
from support.weights import weights_process

MODEL = "kvmesh-demo"


@pytest.fixture(scope="module")
def mesh(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers on nodes of their own, each with room for two adapters."""
    env = {
        "KVMESH_WORKER_MAX_ADAPTERS": "2",
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_WEIGHTS_SHARE": "true",
        "KVMESH_ROUTER_ADAPTER_IDLE_S": "0.5",
    }
    folder = tmp_path_factory.mktemp("mesh")
    made = Mesh(nats_server.url, folder, env)
    made.start("indexer", "indexer-0")
    made.start("router", "router-0")
    for name in ("worker-0", "worker-1"):
        made.start("worker", name, KVMESH_WEIGHTS_DIRECTORY=str(folder / f"store-{name}"))
    made.start("frontend", "frontend-0")
    yield made
    made.stop()


def complete(mesh: Mesh, model: str, text: str = "one two ") -> dict[str, Any]:
    body = {"model": model, "prompt": text * 20, "max_tokens": 4}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{mesh.url}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return dict(json.load(answer))


def models(mesh: Mesh) -> set[str]:
    with urllib.request.urlopen(f"{mesh.url}/v1/models", timeout=PATIENCE_S) as answer:
        return {entry["id"] for entry in json.load(answer)["data"]}


async def test_workers_without_the_folder_take_an_adapter_from_one_that_has_it(
    mesh: Mesh, tmp_path: Path
) -> None:
    await mesh.ready()
    folder = write_adapter(tmp_path / "poet")
    done = await mesh.command("model", "adapter", "load", "poet", str(folder), "--from", "worker-0")
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    assert [line.partition("@")[0] for line in lines] == [
        "worker-0: loaded poet",
        "worker-1: loaded poet",
    ]
    shutil.rmtree(folder)
    async with AdapterCards(mesh) as cards:
        for name in ("worker-0", "worker-1"):
            offers = partial(cards.offers_only, name, "poet")
            await eventually(offers, what=f"{name} offers it")
            assert cards.loaded(name) == {"poet"}
    await eventually(lambda: "poet" in models(mesh))
    listed = (await mesh.command("model", "adapter", "list")).stdout
    assert " serves on worker-0, worker-1; files on worker-0, worker-1 (" in listed

    done = await mesh.command("model", "adapter", "unload", "poet", "--worker", "worker-1")
    assert done.returncode == 0, done
    again = await mesh.command("model", "adapter", "load", "poet", "--worker", "worker-1")
    assert again.stdout.startswith("worker-1: loaded poet@"), again
    assert (await mesh.command("model", "adapter", "unload", "poet")).returncode == 0
    await eventually(lambda: models(mesh) == {MODEL}, what="nobody offers it")
    missing = await mesh.command("model", "adapter", "load", "poet")
    assert missing.returncode == 1
    assert "no worker offers the files of poet" in missing.stderr


async def load_evictable(mesh: Mesh, folder: Path, name: str, content: int, worker: str) -> None:
    path = write_adapter(folder / name, content)
    done = await mesh.command(
        "model", "adapter", "load", name, str(path), "--worker", worker, "--evictable"
    )
    assert done.returncode == 0, done
    shutil.rmtree(path)


async def test_a_request_has_its_adapter_loaded_where_there_is_room(
    mesh: Mesh, tmp_path: Path
) -> None:
    await mesh.ready()
    names = ("one", "two", "three")
    async with AdapterCards(mesh) as cards:
        for content, name in enumerate(names, 1):
            await load_evictable(mesh, tmp_path, name, content, "worker-0")
        await eventually(lambda: cards.loaded("worker-0") == {"two", "three"}, what="one left")
        assert cards.offered("worker-0") == set(names)
        await eventually(lambda: models(mesh) == {MODEL, *names}, what="all are served")

        answer = await asyncio.to_thread(complete, mesh, "one")
        assert answer["usage"]["completion_tokens"] == 4
        await eventually(lambda: cards.loaded("worker-1") == {"one"}, what="it has room")
        assert "one" in cards.offered("worker-1")

        for content, name in enumerate(("four", "five"), 4):
            await load_evictable(mesh, tmp_path, name, content, "worker-1")
        wanted = (*names, "four", "five")
        for round_ in range(2):  # five adapters take turns in four places
            asked = [asyncio.to_thread(complete, mesh, name, f"{round_} ") for name in wanted]
            answers = await asyncio.gather(*asked)
            assert [answer["model"] for answer in answers] == list(wanted)


async def test_requests_outlive_the_last_worker_that_had_their_adapter_loaded(
    mesh: Mesh, tmp_path: Path
) -> None:
    await mesh.ready()
    async with AdapterCards(mesh) as cards:
        await load_evictable(mesh, tmp_path, "poet", 9, "worker-1")
        taken = await mesh.command(
            "model", "adapter", "load", "poet", "--worker", "worker-0", "--evictable"
        )
        assert taken.returncode == 0, taken
        for content, name in enumerate(("five", "six"), 5):  # it makes room on worker-0
            await load_evictable(mesh, tmp_path, name, content, "worker-0")
        await eventually(lambda: "poet" not in cards.loaded("worker-0"))
        assert "poet" in cards.loaded("worker-1")
        assert "poet" in cards.offered("worker-0")
        mesh.kill("worker-1")
        answer = await asyncio.to_thread(complete, mesh, "poet")
        assert answer["usage"]["completion_tokens"] == 4
        await eventually(lambda: "poet" in cards.loaded("worker-0"))
        mesh.restart("worker-1")


async def test_a_weights_process_that_dies_offers_its_adapters_again(
    mesh: Mesh, tmp_path: Path
) -> None:
    await mesh.ready()
    await load_evictable(mesh, tmp_path, "bard", 11, "worker-0")
    worker = mesh.processes["worker-0"].pid
    former = await eventually(lambda: weights_process(worker))
    os.kill(former, signal.SIGKILL)

    async def loaded() -> bool:
        done = await mesh.command(
            "model", "adapter", "load", "bard", "--worker", "worker-1", "--evictable"
        )
        return done.returncode == 0

    await eventually(loaded, what="the other worker has it")
    assert weights_process(worker) not in (0, former)
