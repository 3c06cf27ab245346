"""A NATS server with one user for all, whose permissions a reload changes."""

import json
from collections.abc import Sequence
from dataclasses import replace

from kvmesh.bus.client import BusOptions
from kvmesh.bus.permissions import Permissions
from support.nats import NatsServer


class RestrictedServer(NatsServer):
    """`forbid` and `permit` reload the configuration: the server drops refused subscriptions."""

    @property
    def credentials(self) -> dict[str, str]:
        return {"KVMESH_NATS_USER": "all", "KVMESH_NATS_PASSWORD": "secret"}

    def options(self, options: BusOptions) -> BusOptions:
        return replace(options, url=self.url, user="all", password="secret")

    def forbid(self, subscribe: Sequence[str] = (), publish: Sequence[str] = ()) -> None:
        self._permit(
            {
                act: {"deny": [*subjects, "unused"]}
                for act, subjects in (("subscribe", subscribe), ("publish", publish))
            }
        )

    def permit(self, permissions: Permissions) -> None:
        """Permit nothing else."""
        publish, subscribe = list(permissions.publish), list(permissions.subscribe)
        self._permit({"publish": {"allow": publish}, "subscribe": {"allow": subscribe}})

    def _permit(self, permissions: dict[str, dict[str, list[str]]]) -> None:
        user = {"user": "all", "password": "secret", "permissions": permissions}
        self.settings = f"authorization: {json.dumps({'users': [user]})}"
        (self.store / "nats.conf").write_text(self.config())
        if self._process is not None:
            self.reload()
