"""A stand-in of the Kubernetes API server: scale subresources, pods, and their controllers.

It checks requests as the real one does: the token, the content type, and the patched object against
the published schemas (https://kubernetes.io/docs/reference/kubernetes-api/, autoscaling/v1 Scale
and core/v1 ObjectMeta). The controllers follow the documented order of removal.
"""

import asyncio
import copy
import itertools
import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from aiohttp import web

TOKEN = "token-of-the-planner"
COST = "controller.kubernetes.io/pod-deletion-cost"
LWS = "leaderworkerset.sigs.k8s.io"
MERGE_PATCH = "application/merge-patch+json"
INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
SCALE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "autoscaling/v1"},
        "kind": {"const": "Scale"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"replicas": {**INT32, "minimum": 0}},
        },
        "status": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"replicas": INT32, "selector": {"type": "string"}},
            "required": ["replicas"],
        },
    },
}
POD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "properties": {
                "annotations": {"type": "object", "additionalProperties": {"type": "string"}}
            },
        }
    },
}
PLURALS = {
    ("apps", "v1", "deployments"): "deployment",
    ("apps", "v1", "statefulsets"): "statefulset",
    ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"): "leaderworkerset",
}


@dataclass
class Workload:
    """A Deployment, StatefulSet or LeaderWorkerSet, whose controller runs at once."""

    kind: str
    name: str
    replicas: int = 0
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its pods that the selector of the scale subresource selects."""
        if self.kind == "leaderworkerset":
            return {f"{LWS}/name": self.name, f"{LWS}/worker-index": "0"}
        return {"app": self.name}

    def living(self) -> list[dict[str, Any]]:
        """Pods that count, each group of a LeaderWorkerSet by its leader."""
        return [
            pod
            for pod in self.pods.values()
            if "deletionTimestamp" not in pod["metadata"]
            and self.labels.items() <= pod["metadata"]["labels"].items()
        ]

    def set(self, replicas: int) -> None:
        """Set the replicas and create or remove pods; removed ones stay for their grace period."""
        self.replicas = replicas
        while len(self.living()) < replicas:
            self._create()
        while len(self.living()) > replicas:
            last = max(self.living(), key=self._removal)
            last["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"

    def _create(self) -> None:
        number, taken = next(self.numbers), {pod["metadata"]["name"] for pod in self.living()}
        if self.kind == "deployment":
            self._pod(f"{self.name}-7d9f-{(number * 7919) % 10**5:05}", number, self.labels)
            return
        name = next(n for i in itertools.count() if (n := f"{self.name}-{i}") not in taken)
        self._pod(name, number, self.labels)
        if self.kind == "leaderworkerset":
            self._pod(f"{name}-1", number, {**self.labels, f"{LWS}/worker-index": "1"})

    def _pod(self, name: str, number: int, labels: dict[str, str]) -> None:
        time = f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z"
        self.pods[name] = {
            "metadata": {"name": name, "labels": dict(labels), "creationTimestamp": time},
            "status": {"phase": "Running"},
        }

    def _removal(self, pod: dict[str, Any]) -> tuple[Any, ...]:
        """The greatest key goes first."""
        meta = pod["metadata"]
        if self.kind != "deployment":
            return (int(meta["name"].rpartition("-")[2]),)
        cost = int(meta.get("annotations", {}).get(COST, "0"))
        return (pod["status"]["phase"] != "Running", -cost, meta["creationTimestamp"])


class KubernetesServer:
    """The server, at `url` once started.

    `refuse` is a status and message for every request; `vanish` are pods that are listed but gone
    when they are patched; `hold` delays all replies until the stop.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.workloads: dict[tuple[str, str], Workload] = {}
        self.patches: list[str] = []
        self.refuse: tuple[int, str] | None = None
        self.vanish: set[str] = set()
        self.page = 2
        self._free = asyncio.Event()
        self._free.set()
        self.url = ""
        self._runner: web.AppRunner | None = None

    def add(self, kind: str, name: str, replicas: int) -> Workload:
        workload = Workload(kind, name)
        workload.set(replicas)
        self.workloads[kind, name] = workload
        return workload

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        scale = "/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}/scale"
        app.router.add_route("*", scale, self._scale)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._list)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", self._patch_pod)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"

    def hold(self) -> None:
        self._free.clear()

    async def stop(self) -> None:
        self._free.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, folder: Path, token: str = TOKEN) -> Path:
        """Write a kubeconfig for this server; its context names the namespace."""
        context = {"cluster": "c", "user": "u", "namespace": self.namespace}
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
        }
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(tree))
        return file

    async def _scale(self, request: web.Request) -> web.Response:
        await self._free.wait()
        if (failure := self._check(request)) is not None:
            return failure
        match = request.match_info
        kind = PLURALS.get((match["group"], match["version"], match["plural"]))
        workload = self.workloads.get((kind or "", match["name"]))
        if workload is None:
            return _failure(404, f'{match["plural"]}.{match["group"]} "{match["name"]}" not found')
        present = self._scale_object(workload)
        if request.method == "GET":
            return web.json_response(present)
        if request.method != "PATCH":
            return _failure(405, "the server does not allow this method on the requested resource")
        merged = await self._merged(request, present, SCALE)
        if isinstance(merged, web.Response):
            return merged
        self.patches.append(f"{kind}/{workload.name}")
        workload.set(merged["spec"].get("replicas", 0))
        return web.json_response(self._scale_object(workload))

    def _scale_object(self, workload: Workload) -> dict[str, Any]:
        selector = ",".join(f"{key}={value}" for key, value in workload.labels.items())
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": workload.name, "namespace": self.namespace},
            # Go omits a zero here
            "spec": {"replicas": workload.replicas} if workload.replicas else {},
            "status": {"replicas": len(workload.living()), "selector": selector},
        }

    async def _list(self, request: web.Request) -> web.Response:
        if (failure := self._check(request)) is not None:
            return failure
        selector = request.query.get("labelSelector", "")
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        found = [
            pod
            for workload in self.workloads.values()
            for pod in workload.pods.values()
            if wanted.items() <= pod["metadata"]["labels"].items()
        ]
        first = int(request.query.get("continue") or 0)
        size = min(self.page, int(request.query.get("limit") or self.page))
        more = str(first + size) if first + size < len(found) else ""
        return web.json_response(
            {
                "apiVersion": "v1",
                "kind": "PodList",
                "metadata": {"resourceVersion": "1", **({"continue": more} if more else {})},
                "items": found[first : first + size],
            }
        )

    async def _patch_pod(self, request: web.Request) -> web.Response:
        if (failure := self._check(request)) is not None:
            return failure
        name = request.match_info["name"]
        for workload in self.workloads.values():
            if name in workload.pods and name not in self.vanish:
                merged = await self._merged(request, workload.pods[name], POD)
                if isinstance(merged, web.Response):
                    return merged
                self.patches.append(f"pod/{name}")
                workload.pods[name] = merged
                return web.json_response(merged)
        return _failure(404, f'pods "{name}" not found')

    def _check(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _failure(401, "Unauthorized")
        if self.refuse is not None:
            return _failure(*self.refuse)
        if request.match_info["namespace"] != self.namespace:
            return _failure(403, f'forbidden in the namespace "{request.match_info["namespace"]}"')
        return None

    async def _merged(
        self, request: web.Request, present: dict[str, Any], schema: dict[str, Any]
    ) -> dict[str, Any] | web.Response:
        """The object with the request's JSON merge patch (RFC 7396)."""
        if request.content_type != MERGE_PATCH:
            return _failure(
                415, f"the body of the request was in an unknown format - {MERGE_PATCH}"
            )
        merged: dict[str, Any] = _merge(copy.deepcopy(present), json.loads(await request.text()))
        try:
            jsonschema.validate(merged, schema)
        except jsonschema.ValidationError as error:
            return _failure(422, error.message)
        return merged


def _merge(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = _merge(target.get(key), value)
    return target


def _failure(code: int, message: str) -> web.Response:
    """A Status object, as the API server describes every failure."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
    return web.json_response({**status, "message": message, "code": code}, status=code)
