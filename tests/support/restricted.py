"""A NATS server with one user for all, whose permissions a reload changes."""

import json
from collections.abc import Sequence
from dataclasses import replace

from kvmesh.bus.client import BusOptions
from support.nats import NatsServer


class RestrictedServer(NatsServer):
    """`forbid` reloads the configuration; the server then drops subscriptions that it forbids."""

    @property
    def credentials(self) -> dict[str, str]:
        return {"KVMESH_NATS_USER": "all", "KVMESH_NATS_PASSWORD": "secret"}

    def options(self, options: BusOptions) -> BusOptions:
        return replace(options, url=self.url, user="all", password="secret")

    def forbid(self, subscribe: Sequence[str] = (), publish: Sequence[str] = ()) -> None:
        denied = {
            act: {"deny": [*subjects, "unused"]}
            for act, subjects in (("subscribe", subscribe), ("publish", publish))
        }
        user = {"user": "all", "password": "secret", "permissions": denied}
        self.settings = f"authorization: {json.dumps({'users': [user]})}"
        (self.store / "nats.conf").write_text(self.config())
        if self._process is not None:
            self.reload()
