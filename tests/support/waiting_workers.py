"""A mesh of `kvmesh up` whose planner keeps workers that wait."""

import json
import urllib.request

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Instance, Role
from support.up import Up


def cards(directory: Directory, role: Role) -> list[Instance]:
    return [card for card in directory.instances if card.role is role and not card.draining]


def complete(up: Up) -> int:
    body = {"model": "kvmesh-demo", "prompt": "What is a mesh?", "max_tokens": 8}
    request = urllib.request.Request(
        up.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def workers(up: Up) -> set[str]:
    return {name for name in up.children() if name.startswith("worker")}


async def put_pools(bus: Bus, pools: str) -> None:
    """As `kvmesh plan set pools=…`."""
    bucket = await bus.js.key_value(bus.subjects.plan_bucket)
    await bucket.put(bus.subjects.plan_settings_key, json.dumps({"pools": [pools]}).encode())
