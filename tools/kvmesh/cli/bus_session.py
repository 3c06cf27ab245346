"""Runs a command's coroutine with a bus connection."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import (
    URL_SETTING,
    BusError,
    BusUnavailable,
    NotFound,
    NotPermitted,
    cause,
)
from kvmesh.cli.local import find_mesh, running_meshes
from kvmesh.runtime import logs
from kvmesh.runtime.service import bus_options
from kvmesh.settings import Settings, redacted

CONNECT_S = 2.0


def run_on_bus(
    name: str,
    settings: Settings,
    main: Callable[[Bus], Awaitable[int]],
    failed: Callable[[str], int] | None = None,
) -> int:
    """Connect, run `main`, disconnect; return its exit status.

    An error is passed to `failed`, which returns the status, or printed: then the status is 1.
    """
    logs.configure(settings.log, name)
    settings, found = find_mesh(settings)
    if found:
        print(f"kvmesh {name}: {found}", file=sys.stderr)
    try:
        return asyncio.run(_run(name, settings, main))
    except NotFound:
        url = redacted(bus_options(settings.nats).url)
        reason = f"no mesh named {settings.nats.namespace} at {url}{_others(url)}"
    except BusUnavailable as error:
        url = redacted(bus_options(settings.nats).url)
        hint = f" ({URL_SETTING}, or the state directory of `kvmesh up` with --state-dir)"
        reason = f"{error}{'' if error.denied else hint}{_others(url)}"
    except NotPermitted as error:
        hint = ": run it as a user with this permission, such as operator"
        reason = cause(error) + (hint if error.publishes else "")
    except (BusError, TimeoutError) as error:
        reason = cause(error)
    if failed is not None:
        return failed(reason)
    print(f"kvmesh {name}: {reason}", file=sys.stderr)
    return 1


def _others(url: str) -> str:
    """Names the meshes that this user runs elsewhere; empty if there are none."""
    others = [f"--state-dir {path}" for path, mesh in running_meshes() if mesh.url != url]
    return f"; `kvmesh up` runs with {' and with '.join(others[:3])}" if others else ""


async def _run(name: str, settings: Settings, main: Callable[[Bus], Awaitable[int]]) -> int:
    bus = await Bus.connect(bus_options(settings.nats), name, CONNECT_S, once=True)
    try:
        return await main(bus)
    finally:
        await bus.close()
