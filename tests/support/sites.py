"""Two sites: a hub and a leaf node with JetStream in domains of their own, or a gateway."""

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


class Gateways:
    """Two clusters with a gateway between them; the first, of three servers, has JetStream."""

    def __init__(self, folder: Path) -> None:
        self.near = [NatsServer(folder / f"near{n}") for n in range(3)]
        self.far = NatsServer(folder / "far")
        self.far.jetstream = None
        routes = [free_port() for _ in self.near]
        gates = {server: free_port() for server in (*self.near, self.far)}
        listed = ", ".join(f"'nats://127.0.0.1:{port}'" for port in routes)
        near = ", ".join(f"'nats://127.0.0.1:{gates[server]}'" for server in self.near)
        known = (
            f"gateways: [{{ name: near, urls: [{near}] }},"
            f" {{ name: far, url: 'nats://127.0.0.1:{gates[self.far]}' }}]"
        )
        for number, server in enumerate(self.near):
            server.settings = (
                f"server_name: near{number}\n"
                f"cluster {{ name: near, listen: '127.0.0.1:{routes[number]}',"
                f" routes: [{listed}] }}\n"
                f"gateway {{ name: near, listen: '127.0.0.1:{gates[server]}', {known} }}"
            )
        self.far.settings = (
            "server_name: far\n"
            f"gateway {{ name: far, listen: '127.0.0.1:{gates[self.far]}', {known} }}"
        )

    def start(self) -> None:
        for server in (*self.near, self.far):
            server.start()

    def stop(self) -> None:
        for server in (self.far, *self.near):
            server.kill()


class Accounts:
    """One server, on which an account without JetStream imports the API of another under `PREFIX`.

    Its user is `mesh`, with the same password.
    """

    PREFIX = "JS.store"

    def __init__(self, folder: Path, namespace: str) -> None:
        streams = [f"kvm.{namespace}.{kind}.>" for kind in ("kv", "route", "seq", "scaling")]
        moved = {"$JS.API.>": f"{self.PREFIX}.>", "$KV.>": f"{self.PREFIX}.$KV.>"}
        services = [*moved, "$JS.FC.>", "$O.>", *streams]
        inboxes = "{ stream: { account: STORE, subject: '_INBOX.>' } }"
        exports = [f"{{ service: '{each}' }}" for each in services] + ["{ stream: '_INBOX.>' }"]
        imports = [
            f"{{ service: {{ account: STORE, subject: '{each}' }}, to: '{moved.get(each, each)}' }}"
            for each in services
        ]
        self.server = NatsServer(folder)
        self.server.settings = (
            "accounts {\n"
            " STORE { jetstream: enabled, users: [ { user: store, password: store } ],\n"
            f"  exports: [ {', '.join(exports)} ] }}\n"
            " MESH { users: [ { user: mesh, password: mesh } ],\n"
            f"  imports: [ {', '.join([*imports, inboxes])} ] }}\n"
            "}"
        )
