"""Facts that HTTP tells: NATS's monitoring port, and frontends that need no key."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from kvmesh.bus.messages import Instance, Role
from kvmesh.cli.doctor.facts import MonitoredServer, OpenFrontend

ASK_S = 2.0
MOST_FRONTENDS = 32
ANY_HOST = ("0.0.0.0", "::", "[::]")
NANO = 1e9


class MonitoringError(Exception):
    """The monitoring port does not answer as nats-server does; the message says how."""


async def monitored(url: str) -> MonitoredServer:
    """The settings and use of JetStream of the server at `url`; raises MonitoringError."""
    told = await asyncio.to_thread(_json, f"{url.rstrip('/')}/jsz")
    config = told.get("config") or {}
    return MonitoredServer(
        url=url,
        stores=bool(config),
        sync_s=float(config.get("sync_interval") or 0) / NANO,
        sync_always=bool(config.get("sync_always")),
        used=int(told.get("storage") or 0),
        most=int(config.get("max_storage") or 0),
    )


def _json(url: str) -> dict[str, Any]:
    try:
        with urlopen(url, timeout=ASK_S) as reply:
            found = json.load(reply)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MonitoringError(f"no answer of nats-server at {url}: {reason}") from error
    if not isinstance(found, dict) or "server_id" not in found:
        raise MonitoringError(f"{url} is not the monitoring port of a nats-server")
    return found


async def open_frontends(cards: Iterable[Instance]) -> list[OpenFrontend]:
    """The frontends that listen beyond their machine, and whether they need a key."""
    exposed = {
        card.instance: card.endpoint
        for card in cards
        if card.role is Role.FRONTEND and card.endpoint and _is_exposed(card.endpoint)
    }
    asked = dict(list(exposed.items())[:MOST_FRONTENDS])
    needed = await asyncio.gather(*(asyncio.to_thread(_needs_key, url) for url in asked.values()))
    return [
        OpenFrontend(instance, url, needs_key)
        for (instance, url), needs_key in zip(asked.items(), needed, strict=True)
        if needs_key is not None
    ]


def _is_exposed(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return bool(host) and host not in ("127.0.0.1", "::1", "localhost")


def _needs_key(endpoint: str) -> bool | None:
    """True if a list of models needs a key; None if this machine does not reach the frontend."""
    parts = urlsplit(endpoint)
    host = "127.0.0.1" if parts.hostname in ANY_HOST else parts.netloc.rpartition(":")[0]
    try:
        with urlopen(f"http://{host}:{parts.port}/v1/models", timeout=ASK_S):
            return False
    except HTTPError as error:
        return True if error.code in (401, 403) else None
    except (URLError, OSError, ValueError):
        return None
