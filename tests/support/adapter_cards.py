"""The adapters on the cards of a mesh's workers."""

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Instance, Role, adapter_name
from kvmesh.bus.streams.configuration import StreamLimits
from support.mesh import Mesh


class AdapterCards:
    """Follows the cards of workers within the block."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def __aenter__(self) -> "AdapterCards":
        self._bus = await Bus.connect(self._mesh.options, "test", 10)
        self._directory = Directory(self._bus, StreamLimits(), role=Role.WORKER)
        await self._directory.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._directory.close()
        await self._bus.close()

    def card(self, name: str) -> Instance:
        """The card of the worker with this name."""
        (found,) = [card for card in self._directory.instances if card.name == name]
        return found

    def loaded(self, name: str) -> set[str]:
        """The names of the adapters that a worker has loaded."""
        model = self.card(name).model
        return set(map(adapter_name, model.adapters)) if model is not None else set()

    def offered(self, name: str) -> set[str]:
        """The names of the adapters whose files a worker offers."""
        host = self.card(name).adapters
        return {adapter_name(files.adapter) for files in host.files} if host else set()

    def offers_only(self, name: str, adapter: str) -> bool:
        return self.offered(name) == {adapter}
