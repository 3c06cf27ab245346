"""`kvmesh config set`: settings change in running processes, and in those that start later."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import eventually

BODY = {"model": "kvmesh-demo", "prompt": "Count. ", "ignore_eos": True}


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path)
    try:
        mesh.start_all(workers=1)
        await mesh.ready()
        yield mesh
    finally:
        mesh.stop()


async def config(mesh: Mesh, *arguments: str) -> tuple[int, str]:
    """Status and output of the command."""
    done = await mesh.command("config", *arguments)
    return done.returncode, done.stdout + done.stderr


async def second_status(url: str) -> int:
    """The status of a request beside one that still streams: 429 if both are too many."""

    async def attempt() -> int:
        """0 where a stream before has not ended yet, or a frontend on a busy machine is behind."""
        async with client.stream("POST", f"{url}/v1/completions", json=body) as first:
            if first.status_code != 200:
                return 0
            parts = first.aiter_bytes()  # held, since its end would be the stream's
            await anext(parts)
            short = await client.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 1})
            return 0 if "behind" in short.text else short.status_code

    body = {**BODY, "max_tokens": 5000, "stream": True}
    async with httpx.AsyncClient(timeout=60) as client:
        return await eventually(attempt)


async def test_settings_change_in_running_processes_and_in_new_ones(mesh: Mesh) -> None:
    assert await second_status(mesh.url) == 200
    status, text = await config(
        mesh, "set", "frontend.max_in_flight=1", "router.temperature=0.5", "router.queue_limit=9"
    )
    assert (status, "applied by 1 of 1 frontends" in text) == (0, True), text
    assert "applied by 1 of 1 routers" in text
    assert await second_status(mesh.url) == 429
    assert "router.temperature is 0.5, it was 0.0" in mesh.logs()

    port = free_port()
    mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(port))
    other = f"http://127.0.0.1:{port}"

    async def serves() -> bool:
        async with httpx.AsyncClient() as client:
            try:
                return (await client.get(f"{other}/health")).status_code == 200
            except httpx.HTTPError:
                return False

    await eventually(serves)
    assert await second_status(other) == 429

    status, text = await config(mesh, "unset", "frontend.max_in_flight")
    assert (status, "applied by 2 of 2 frontends" in text) == (0, True), text
    assert await second_status(mesh.url) == 200
    status, text = await config(mesh, "changes")
    assert status == 0
    assert text.splitlines()[:2] == ["router.queue_limit = 9", "router.temperature = 0.5"]
    assert len([line for line in text.splitlines() if "frontend.max_in_flight" in line]) == 2
    assert "@" in text


async def test_a_process_that_cannot_apply_a_change_is_named(mesh: Mesh) -> None:
    mesh.processes["router-0"].send_signal(19)
    try:
        status, text = await config(mesh, "set", "router.temperature=1")
    finally:
        mesh.processes["router-0"].send_signal(18)
    assert status == 1
    assert "applied by 0 of 1 routers" in text
    assert "router-0-" in text


async def test_what_needs_a_restart_or_is_wrong_is_refused(mesh: Mesh) -> None:
    for arguments, words in (
        (("set", "frontend.port=1"), "kvmesh fleet roll frontend"),
        (("set", "router.policy=kv"), "kvmesh fleet roll router"),
        (("set", "router.queue_order=lifo"), "must be one of fcfs, wspt, lcfs"),
        (("set", "router.queue_limt=1"), "did you mean router.queue_limit"),
        (("set", "router.queue_limit"), "NAME=VALUE"),
        (("unset", "router.queue_limit=1"), "takes no value"),
        (("set",), "needs names"),
        (("changes", "router"), "takes no names"),
    ):
        status, text = await config(mesh, *arguments)
        assert (status, words in text) == (2, True), text
    status, text = await config(mesh, "set", "router.rescore_s=1000")
    assert (status, "nothing was changed in router" in text) == (1, True), text
    assert await config(mesh, "changes") == (0, "no setting was changed\n")


async def test_two_operators_change_settings_at_once(mesh: Mesh) -> None:
    names = ("router.queue_limit", "router.adapter_wait_s", "router.credit_decay")
    done = await asyncio.gather(*(config(mesh, "set", f"{name}=7") for name in names))
    assert [status for status, _ in done] == [0, 0, 0], done
    _, text = await config(mesh, "changes")
    assert text.splitlines()[:3] == [f"{name} = 7" for name in sorted(names)]
