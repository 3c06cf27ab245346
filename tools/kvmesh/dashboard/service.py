"""The dashboard process: follows the mesh, and serves the page."""

import importlib
import importlib.util
import logging

from kvmesh.bus.errors import BusError, cause
from kvmesh.dashboard.mesh import Mesh
from kvmesh.frontend.auth.authenticator import Authenticator, KeysError
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.runtime.service import Service, StartError
from kvmesh.settings.schema import DashboardSettings, Settings
from kvmesh.settings.schema.common import LOOPBACK

log = logging.getLogger(__name__)
LOCAL = (LOOPBACK, "::1", "localhost")


def check(settings: Settings) -> None:
    """Raises StartError if the library of the page is missing, or everyone could read it.

    It imports the library, too, which takes seconds: a signal ends the process meanwhile.
    """
    if importlib.util.find_spec("nicegui") is None:
        raise StartError("the dashboard needs NiceGUI: pip install 'kvmesh[dashboard]'", True)
    own = settings.dashboard
    keys = own.keys_file is not None or own.keys_bucket
    if not keys and not own.allow_anonymous and not is_local(own):
        raise StartError(
            f"refusing to show the mesh to everyone who reaches {own.host}: configure"
            " dashboard.keys_file or dashboard.keys_bucket, or set dashboard.allow_anonymous"
            " (with compose: KVMESH_KEYS_FILE, KVMESH_KEYS_BUCKET, KVMESH_ALLOW_ANONYMOUS)",
            permanent=True,
        )
    importlib.import_module("kvmesh.dashboard.http.server")


def is_local(settings: DashboardSettings) -> bool:
    """True if only this machine can connect."""
    return settings.host in LOCAL


async def main(service: Service) -> None:
    """Serve the page until the service is stopped."""
    from kvmesh.dashboard.http.server import serve

    own = service.settings.dashboard
    keys = Authenticator(
        service.bus, own.keys_file, own.keys_bucket, is_local(own), TenantNamespaces()
    )
    try:
        await keys.open()
    except KeysError as error:
        raise StartError(
            "cannot read the API keys of dashboard.keys_file"
            f" (with compose: KVMESH_KEYS_FILE): {error}",
            permanent=True,
        ) from error
    except BusError as error:
        raise StartError(f"cannot read the API keys: {cause(error)}") from error
    mesh = Mesh(service.bus, service.settings)
    try:
        async with mesh.following():
            service.spawn(keys.run(), "keys")
            service.start_watchdog()
            await serve(service, mesh, keys)
    except BusError as error:
        raise StartError(f"cannot follow the mesh: {cause(error)}") from error
