"""Several frontend processes on one port: the first one starts the others and keeps them up.

The kernel spreads connections over all that listen with SO_REUSEPORT.
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
STOP_S = 15.0  # beyond what a sibling may take to drain
WATCH_S = 1.0


def check(settings: Settings) -> None:
    """Raises StartError where several processes cannot share a port."""
    if settings.frontend.processes > 1 and settings.frontend.port == 0:
        raise StartError("frontend.processes needs a fixed frontend.port", permanent=True)


async def keep(service: Service) -> None:
    """Run all siblings of this process until it stops."""
    count = service.settings.frontend.processes
    async with asyncio.TaskGroup() as group:
        for number in range(1, count):
            group.create_task(_keep_one(service, number))


async def _keep_one(service: Service, number: int) -> None:
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
            await _stop(process, ended, frontend.linger_s + frontend.drain_timeout_s + STOP_S)
            return
        log.warning("frontend process %d ended with status %s", number, process.returncode)
        await asyncio.sleep(RESTART_S)


async def _stop(
    process: asyncio.subprocess.Process, ended: "asyncio.Task[int]", patience_s: float
) -> None:
    process.terminate()
    await asyncio.wait([ended], timeout=patience_s)
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
    """Stop when the process that started this one is gone; nothing to do in the first one."""
    parent = os.environ.get(PARENT)
    while parent is not None and os.getppid() == int(parent):
        await asyncio.sleep(WATCH_S)
    if parent is not None:
        log.warning("the first frontend process is gone: stopping")
        service.stopping.set()
