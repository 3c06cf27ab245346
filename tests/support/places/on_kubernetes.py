"""A place for the connector `kubernetes`."""

from pathlib import Path

import pytest

from kvmesh.planner.connectors.kubernetes import KubernetesConnector
from kvmesh.planner.core.pools import Pool
from support.places.kubernetes_server import KubernetesServer
from support.places.place import POOLS, TIMEOUT_S


class KubernetesPlace:
    """Two workloads of one kind on a stand-in of the API server."""

    silence = "cannot reach the Kubernetes API"
    cut_timeout_s = TIMEOUT_S

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, kind: str) -> None:
        self.server = KubernetesServer("inference")
        self.pools = [Pool(name, target=f"{kind}/kvmesh-{name}") for name in POOLS]
        self._kind = kind
        self._folder = folder
        self._patch = patch
        self._connectors: list[KubernetesConnector] = []

    @property
    def changes(self) -> int:
        return len(self.server.patches)

    def connector(self, timeout_s: float = TIMEOUT_S) -> KubernetesConnector:
        self._connectors.append(KubernetesConnector("", self.pools, timeout_s))
        return self._connectors[-1]

    async def start(self) -> None:
        for name, number in POOLS.items():
            self.server.add(self._kind, f"kvmesh-{name}", number)
        await self.server.start()
        self._patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        self._patch.setenv("KUBECONFIG", str(self.server.kubeconfig(self._folder)))

    async def running(self, pool: str) -> list[str]:
        workload = self.server.workloads[self._kind, f"kvmesh-{pool}"]
        return [pod["metadata"]["name"] for pod in workload.living()]

    async def set(self, pool: str, number: int) -> None:
        self.server.workloads[self._kind, f"kvmesh-{pool}"].set(number)

    async def cut(self) -> None:
        await self.server.stop()

    async def close(self) -> None:
        for connector in self._connectors:
            await connector.close()
        await self.server.stop()
