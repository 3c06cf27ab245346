"""The connector `kubernetes`: each pool is a Deployment, a StatefulSet or a LeaderWorkerSet."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvmesh.planner.connectors.interface import ConnectorError, PoolState
from kvmesh.planner.connectors.kubernetes_api import KubernetesApi, Pod
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.errors import PlannerConfigError

# Group, version and plural of each kind that has a scale subresource and runs workers.
KINDS = {
    "deployment": "apps/v1/deployments",
    "statefulset": "apps/v1/statefulsets",
    "leaderworkerset": "leaderworkerset.x-k8s.io/v1/leaderworkersets",
}
# A ReplicaSet removes ready pods in ascending order of this annotation; pods without it have 0.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
STOPPED = "-2147483648"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_ORDINAL = re.compile(r"-(\d+)$")
ENDED = ("Succeeded", "Failed")


class KubernetesConnector:
    """Sets replicas through the scale subresource, within `timeout_s` seconds a call.

    The target of a pool is `KIND/NAME`; the default is `deployment/` and the pool's name. A worker
    is named like its pod, in a LeaderWorkerSet like the leader's. Only Deployments let the
    connector choose the pods that end: StatefulSets and LeaderWorkerSets remove the highest
    ordinal. Raises PlannerConfigError for a target of another form.
    """

    def __init__(self, namespace: str, pools: Sequence[Pool], timeout_s: float) -> None:
        self._targets = {pool.name: _target(pool) for pool in pools}
        self.chooses = all(kind == "deployment" for kind, _ in self._targets.values())
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._api: KubernetesApi | None = None

    async def open(self) -> None:
        """Connect and read every pool once; raises ConnectorError."""
        await self.state()

    async def state(self) -> dict[str, PoolState]:
        """Wanted replicas and pods of each pool; raises ConnectorError."""
        async with self._connected() as api:
            return {pool: await self._pool(api, pool) for pool in self._targets}

    async def scale(self, pools: dict[str, int], stop: Sequence[str] = ()) -> None:
        """Set the replicas of each pool; raises ConnectorError."""
        if unknown := sorted(pools.keys() - self._targets.keys()):
            raise ConnectorError(f"unknown pool {', '.join(unknown)}", permanent=True)
        async with self._connected() as api:
            for pool, number in pools.items():
                kind, path = self._targets[pool]
                scale = await api.scale_of(path)
                if scale.spec.replicas == number:
                    continue
                if number < scale.spec.replicas and kind == "deployment":
                    await _mark(api, scale.status.selector, stop)
                await api.set_replicas(path, number)

    async def close(self) -> None:
        """Close the connections."""
        if self._api is not None:
            await self._api.close()
            self._api = None

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[KubernetesApi]:
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._api is None:
                    self._api = await KubernetesApi.connect(self._namespace)
                yield self._api
        except TimeoutError:
            raise ConnectorError(
                f"the Kubernetes API does not reply within {self._timeout_s:g} s"
            ) from None

    async def _pool(self, api: KubernetesApi, pool: str) -> PoolState:
        kind, path = self._targets[pool]
        scale = await api.scale_of(path)
        pods = await _living(api, scale.status.selector)
        ordered = sorted(pods, key=_last_removed if kind == "deployment" else _ordinal)
        return PoolState(scale.spec.replicas, tuple(pod.metadata.name for pod in ordered))


def _target(pool: Pool) -> tuple[str, str]:
    """The kind of a pool's target, and its path in the API."""
    target = pool.target or f"deployment/{pool.name}"
    kind, slash, name = target.partition("/")
    if not slash or kind not in KINDS or not _NAME.fullmatch(name):
        kinds = ", ".join(f"{kind}/NAME" for kind in KINDS)
        raise PlannerConfigError(
            f"planner.pools: pool {pool.name}: the target {target} is none of {kinds}"
        )
    return kind, f"{KINDS[kind]}/{name}"


async def _living(api: KubernetesApi, selector: str) -> list[Pod]:
    if not selector:  # it would match every pod of the namespace
        return []
    pods = await api.pods(selector)
    return [p for p in pods if not p.metadata.deletion_timestamp and p.status.phase not in ENDED]


async def _mark(api: KubernetesApi, selector: str, stop: Sequence[str]) -> None:
    """Give the pods in `stop` the least deletion cost, and take it from those no longer in it."""
    for pod in await _living(api, selector):
        name, marked = pod.metadata.name, pod.metadata.annotations.get(DELETION_COST) == STOPPED
        if (name in stop) != marked:
            await api.annotate(name, DELETION_COST, STOPPED if name in stop else None)


def _last_removed(pod: Pod) -> tuple[bool, int, str, str]:
    """A key that puts the pod that a ReplicaSet removes next at the end.

    It removes pods that do not run, then those of the least cost, then the newest. Its further
    criteria, such as pods on one node, are not known here.
    """
    meta = pod.metadata
    cost = meta.annotations.get(DELETION_COST, "0")
    number = int(cost) if re.fullmatch(r"-?\d+", cost) else 0
    return (pod.status.phase != "Running", -number, meta.creation_timestamp, meta.name)


def _ordinal(pod: Pod) -> tuple[int, str]:
    match = _ORDINAL.search(pod.metadata.name)
    return (int(match[1]) if match else 0, pod.metadata.name)
