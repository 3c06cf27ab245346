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
from kvmesh.cli.local import with_local_mesh
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
    settings = with_local_mesh(settings)
    try:
        return asyncio.run(_run(name, settings, main))
    except NotFound:
        url = redacted(bus_options(settings.nats).url)
        reason = f"no mesh named {settings.nats.namespace} at {url}"
    except BusUnavailable as error:
        reason = str(error) if error.denied else f"{error} ({URL_SETTING})"
    except NotPermitted as error:
        hint = ": run it as a user with this permission, such as operator"
        reason = cause(error) + (hint if error.publishes else "")
    except (BusError, TimeoutError) as error:
        reason = cause(error)
    if failed is not None:
        return failed(reason)
    print(f"kvmesh {name}: {reason}", file=sys.stderr)
    return 1


async def _run(name: str, settings: Settings, main: Callable[[Bus], Awaitable[int]]) -> int:
    bus = await Bus.connect(bus_options(settings.nats), name, CONNECT_S, once=True)
    try:
        return await main(bus)
    finally:
        await bus.close()
