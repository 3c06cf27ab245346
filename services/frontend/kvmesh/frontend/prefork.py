"""Several frontend processes on one port: the first starts the others and restarts them.

The kernel spreads connections over all processes that listen with SO_REUSEPORT.
"""

import asyncio
import logging
import os
import sys

from msgspec.structs import replace

from kvmesh.runtime.service import Service, StartError
from kvmesh.settings import Settings, to_env, variables

log = logging.getLogger(__name__)
PARENT = "KVMESH_PARENT_PID"
RESTART_S = 1.0
STOP_S = 15.0  # for a child to end, after its time to drain
WATCH_S = 1.0


def check_settings(settings: Settings) -> None:
    """Raises StartError for settings with which processes cannot share a port."""
    if settings.frontend.processes > 1 and settings.frontend.port == 0:
        raise StartError("frontend.processes needs a fixed frontend.port", permanent=True)


async def supervise(service: Service) -> None:
    """Run the other processes until this one stops."""
    count = service.settings.frontend.processes
    async with asyncio.TaskGroup() as group:
        for number in range(1, count):
            group.create_task(_supervise_one(service, number))


async def _supervise_one(service: Service, number: int) -> None:
    env = _environment(service, number)
    while not service.stopping.is_set():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvmesh.frontend"), env=env
        )
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(service.stopping.wait())
        await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            frontend = service.settings.frontend
            patience_s = frontend.linger_s + frontend.drain_timeout_s + STOP_S
            await _stop(process, ended, patience_s, service.hurry)
            return
        log.warning("frontend process %d ended with status %s", number, process.returncode)
        await asyncio.sleep(RESTART_S)


async def _stop(
    process: asyncio.subprocess.Process,
    ended: "asyncio.Task[int]",
    timeout_s: float,
    hurry: asyncio.Event | None,
) -> None:
    process.terminate()
    hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
    await asyncio.wait([ended, hurried], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if hurried.done() and not ended.done():
        process.terminate()
        await asyncio.wait([ended], timeout=STOP_S)
    hurried.cancel()
    if not ended.done():
        process.kill()
        await ended


def _environment(service: Service, number: int) -> dict[str, str]:
    frontend = service.settings.frontend
    port = frontend.metrics_port
    own = replace(
        frontend,
        name=f"{service.name}-{number}",
        processes=1,
        reuse_port=True,
        metrics_port=port + number if port else 0,
    )
    settings = replace(service.settings, frontend=own)
    ours = set(variables())
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return {**inherited, **to_env(settings), PARENT: str(os.getpid())}


async def follow_parent(service: Service) -> None:
    """Stop this process once its parent has ended; returns at once in the first process."""
    parent = os.environ.get(PARENT)
    while parent is not None and os.getppid() == int(parent):
        await asyncio.sleep(WATCH_S)
    if parent is not None:
        log.warning("stopping: the first frontend process has ended")
        service.stopping.set()
