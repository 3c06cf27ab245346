"""LoRA adapters at run time: `kvmesh model adapter` beside real processes, a worker's commands."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapter_folder import write_adapter
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually
from support.worker import FAST, SLOW, ScriptedFrontend, Workers, prompt, work

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Cancel, LoadAdapter, UnloadAdapter, adapter_name
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.settings.schema import WorkerSettings

MODEL = "kvmesh-demo"
ADAPTABLE = WorkerSettings(max_adapters=2)


@pytest.fixture(scope="module")
def mesh(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    env = {"KVMESH_WORKER_MAX_ADAPTERS": "2", "KVMESH_MOCK_SPEEDUP": "50"}
    made = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    made.start_all(workers=2)
    made.start("worker", "plain", KVMESH_WORKER_MAX_ADAPTERS="0")
    yield made
    made.stop()


def get(mesh: Mesh, path: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(mesh.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return dict(json.load(answer))


def models(mesh: Mesh) -> list[str]:
    return [entry["id"] for entry in get(mesh, "/v1/models")["data"]]


def cached(mesh: Mesh, model: str, text: str) -> int:
    body = {"model": model, "prompt": text * 40, "max_tokens": 4}
    usage = get(mesh, "/v1/completions", body)["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))


async def test_an_adapter_is_loaded_changed_and_unloaded(mesh: Mesh, tmp_path: Path) -> None:
    await mesh.ready()
    await eventually(lambda: models(mesh) == [MODEL])
    assert (await mesh.command("model", "adapter", "list")).stdout == "no adapters\n"
    folder = write_adapter(tmp_path / "poet", content=1)
    workers = ("--worker", "worker-0"), ("--worker", "worker-1")
    for worker in workers:
        done = await mesh.command("model", "adapter", "load", "poet", str(folder), *worker)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert done.stdout.startswith(f"{worker[1]}: loaded poet@")
    await eventually(lambda: models(mesh) == [MODEL, "poet"], what="the frontend lists it")
    assert cached(mesh, "poet", "one two ") == 0
    await eventually(lambda: cached(mesh, "poet", "one two ") > 0, what="its own blocks")
    assert cached(mesh, MODEL, "one two ") == 0

    write_adapter(folder, content=2)
    for worker in workers:
        assert (
            await mesh.command("model", "adapter", "load", "poet", str(folder), *worker)
        ).returncode == 0

    async def served() -> list[str]:
        lines = (await mesh.command("model", "adapter", "list")).stdout.splitlines()
        return [line for line in lines if "serves on worker-0, worker-1" in line]

    (line,) = await eventually(served, what="both have the new one")
    assert line.startswith(f"{MODEL}: poet@")
    await eventually(lambda: cached(mesh, "poet", "ein zwei ") > 0, what="new blocks")
    assert cached(mesh, "poet", "one two ") == 0, "the new content shares no block with the old"

    done = await mesh.command("model", "adapter", "unload", "poet")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines())[0].startswith("worker-0: unloaded poet@")
    assert done.stderr == "plain: unsupported: worker.max_adapters of this worker is 0\n"
    await eventually(lambda: models(mesh) == [MODEL], what="the frontend forgets it")
    with pytest.raises(urllib.error.HTTPError) as refused:
        cached(mesh, "poet", "one two ")
    refused.value.close()
    assert refused.value.code == 404


async def test_requests_of_an_adapter_go_to_workers_that_have_it(
    mesh: Mesh, tmp_path: Path
) -> None:
    await mesh.ready()
    folder = write_adapter(tmp_path / "critic")
    done = await mesh.command(
        "model", "adapter", "load", "critic", str(folder), "--worker", "worker-1"
    )
    assert done.returncode == 0, done
    await eventually(lambda: "critic" in models(mesh))
    for index in range(8):
        cached(mesh, "critic", f"prompt {index} ")
    listed = (await mesh.command("model", "adapter", "list")).stdout
    assert "critic@" in listed
    assert listed.endswith("serves on worker-1\n")
    unloaded = await mesh.command("model", "adapter", "unload", "critic", "--worker", "worker-1")
    assert unloaded.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("load", "bad", "/nowhere", "--worker", "worker-0"), 1, "/nowhere is not a folder"),
        (("load", "bad@1", "/tmp", "--worker", "worker-0"), 1, "cannot have the name 'bad@1'"),
        (("load", MODEL, "/tmp", "--worker", "worker-0"), 1, f"the name '{MODEL}'"),
        (("unload", "ghost", "--worker", "worker-0"), 1, "there is no adapter ghost"),
        (("unload", "ghost", "--worker", "worker-9"), 1, "no worker is called worker-9"),
        (("list", "--model", "other"), 1, "no worker serves other"),
        (("load",), 2, "load takes NAME [FOLDER]"),
        (("load", "bad"), 1, "no worker offers the files of bad"),
        (("unload", "bad", "--timeout-s", "0"), 2, "must be above 0"),
        (("unload", "bad", "--evictable"), 2, "are options of load"),
        (("load", "bad", "/tmp", "--from", "worker-9"), 1, "no worker is called worker-9"),
        (("load", "bad", "/nowhere", "--from", "worker-0"), 1, "/nowhere is not a folder"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason(
    mesh: Mesh, arguments: tuple[str, ...], status: int, reason: str
) -> None:
    await mesh.ready()
    done = await mesh.command("model", "adapter", *arguments)
    assert done.returncode == status, done
    assert reason in done.stderr


async def test_unloading_waits_for_running_requests(
    bus: Bus,
    frontend: ScriptedFrontend,
    workers: Workers,
    limits: StreamLimits,
    tmp_path: Path,
) -> None:
    await workers.start(SLOW, ADAPTABLE)
    directory = Directory(bus, limits)
    await directory.open()

    def listed() -> list[str]:
        (card,) = directory.instances
        return card.model.adapters if card.model is not None else []

    folder = write_adapter(tmp_path / "poet")
    loaded = await frontend.control("w-1", LoadAdapter(name="poet", folder=str(folder)))
    assert loaded.ok, loaded.reason
    await eventually(lambda: listed() == [loaded.adapter])
    item = work("long", prompt(40), max_tokens=2000, adapter=loaded.adapter)
    assert (await frontend.dispatch("w-1", item)).status == "accepted"
    refused = await frontend.control("w-1", UnloadAdapter(name="poet", timeout_s=0.3))
    assert refused.reason == "1 requests still use poet; it stays loaded"
    await eventually(lambda: listed() == [loaded.adapter])
    unloading = asyncio.create_task(frontend.control("w-1", UnloadAdapter(name="poet")))
    await eventually(lambda: listed() == [], what="the card without the adapter")
    late = work("late", prompt(40), adapter=loaded.adapter)
    assert "no adapter" in (await frontend.dispatch("w-1", late)).reason
    assert not unloading.done()
    assert (await frontend.control("w-1", Cancel("long"))).ok
    assert (await unloading).ok
    await directory.close()


async def test_a_replaced_adapter_serves_the_requests_that_came_before(
    frontend: ScriptedFrontend, workers: Workers, tmp_path: Path
) -> None:
    started = await workers.start(FAST, ADAPTABLE)
    folder = write_adapter(tmp_path / "poet", 1)
    first = await frontend.control("w-1", LoadAdapter(name="poet", folder=str(folder)))
    write_adapter(folder, 2)
    second = await frontend.control("w-1", LoadAdapter(name="poet", folder=str(folder)))
    assert second.ok
    assert adapter_name(first.adapter) == adapter_name(second.adapter) == "poet"
    assert first.adapter != second.adapter
    assert started.node.info is not None
    assert started.node.info.adapters == [second.adapter, first.adapter]
    item = work("before", prompt(40), adapter=first.adapter)
    assert (await frontend.dispatch("w-1", item)).status == "accepted"
    await frontend.done("before")
    write_adapter(folder, 1)
    again = await frontend.control("w-1", LoadAdapter(name="poet", folder=str(folder)))
    assert again.adapter == first.adapter
    assert started.node.info.adapters == [first.adapter, second.adapter]
