"""A command's short stay on the bus."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, BusUnavailable, NotFound, NotPermitted, cause
from kvmesh.cli.local import known
from kvmesh.runtime import logs
from kvmesh.runtime.service import bus_options
from kvmesh.settings import Settings, redacted

CONNECT_S = 2.0


def run_on_bus(name: str, settings: Settings, main: Callable[[Bus], Awaitable[int]]) -> int:
    """Connect, run `main`, disconnect; returns its status, or 1 after saying what went wrong."""
    logs.configure(settings.log, name)
    settings = known(settings)
    try:
        return asyncio.run(_run(name, settings, main))
    except NotFound:
        url = redacted(bus_options(settings.nats).url)
        reason = f"no mesh named {settings.nats.namespace} at {url}"
    except BusUnavailable as error:
        reason = f"{error} (--nats or KVMESH_NATS_URL says where it is)"
    except NotPermitted as error:
        reason = f"{cause(error)}: run it with the environment of a user that may, as an operator"
    except (BusError, TimeoutError) as error:
        reason = cause(error)
    print(f"kvmesh {name}: {reason}", file=sys.stderr)
    return 1


async def _run(name: str, settings: Settings, main: Callable[[Bus], Awaitable[int]]) -> int:
    bus = await Bus.connect(bus_options(settings.nats), name, CONNECT_S, once=True)
    try:
        return await main(bus)
    finally:
        await bus.close()
