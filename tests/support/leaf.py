"""A hub and a leaf node, each a NATS server with JetStream in a domain of its own."""

import json
from pathlib import Path

from kvmesh.bus.permissions import Permissions
from support.nats import NatsServer, free_port


class Site:
    """The two servers. At the leaf, the mesh's users are `open` and those of `users`."""

    def __init__(self, folder: Path, users: dict[str, Permissions]) -> None:
        port = free_port()
        self.hub, self.leaf = NatsServer(folder / "hub"), NatsServer(folder / "leaf")
        self.hub.jetstream = "domain: hub"
        self.hub.settings = f"server_name: hub\nleafnodes {{ listen: 127.0.0.1:{port} }}"
        self.leaf.jetstream = "domain: edge"
        remote = f"{{ url: 'nats://127.0.0.1:{port}', account: A }}"
        known = "\n".join(_user(name, allowed) for name, allowed in users.items())
        self.leaf.settings = (
            f"server_name: leaf\nleafnodes {{ reconnect: '1s', remotes: [{remote}] }}\n"
            "accounts { A { jetstream: enabled, users: [\n"
            f"  {{ user: open, password: open }}\n{known}\n] }} }}"
        )

    def start(self) -> None:
        self.hub.start()
        self.leaf.start()

    def stop(self) -> None:
        self.leaf.stop()
        self.hub.stop()


def _user(name: str, allowed: Permissions) -> str:
    publish, subscribe = (json.dumps(list(each)) for each in (allowed.publish, allowed.subscribe))
    permissions = f"publish: {{ allow: {publish} }}, subscribe: {{ allow: {subscribe} }}"
    return f"  {{ user: {name}, password: {name}, permissions: {{ {permissions} }} }}"
