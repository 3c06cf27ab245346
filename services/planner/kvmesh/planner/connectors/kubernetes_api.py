"""The calls of the Kubernetes API that the connector `kubernetes` uses.

The library `kubernetes_asyncio` reads the credentials, of a pod or of a kubeconfig, and sends the
requests. Reference: https://kubernetes.io/docs/reference/kubernetes-api/
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException

from kvmesh.bus.errors import cause
from kvmesh.planner.connectors.interface import ConnectorError

T = TypeVar("T")
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE_PATCH = "application/merge-patch+json"
# a missing object, right or field; other refusals, such as conflicts and overload, pass
PERMANENT = (400, 401, 403, 404, 405, 422)
PAGE = 500


class ScaleSpec(msgspec.Struct):
    """The wanted replicas. Kubernetes omits the field if it is 0."""

    replicas: int = 0


class ScaleStatus(msgspec.Struct):
    """The selector of the pods, in the syntax of a query parameter."""

    selector: str = ""


class Scale(msgspec.Struct):
    """An `autoscaling/v1` Scale, the scale subresource, as far as it is used."""

    spec: ScaleSpec = msgspec.field(default_factory=ScaleSpec)
    status: ScaleStatus = msgspec.field(default_factory=ScaleStatus)


class PodMetadata(msgspec.Struct, rename="camel"):
    """The metadata of a pod, as far as they are used; a `deletion_timestamp` means it ends."""

    name: str
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = {}


class PodStatus(msgspec.Struct):
    """The phase of a pod: Pending, Running, Succeeded, Failed or Unknown."""

    phase: str = "Pending"


class Pod(msgspec.Struct):
    """A pod, as far as it is used."""

    metadata: PodMetadata
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class _ListMetadata(msgspec.Struct):
    continue_: str | None = msgspec.field(name="continue", default=None)


class _PodList(msgspec.Struct):
    items: list[Pod]
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)


class _Status(msgspec.Struct):
    message: str = ""


class KubernetesApi:
    """A client of one namespace; empty stands for that of the pod, or of the kubeconfig's context.

    All methods raise ConnectorError.
    """

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    @classmethod
    async def connect(cls, namespace: str) -> "KubernetesApi":
        """A client with the credentials of this pod, else of the kubeconfig."""
        configuration = Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(  # type: ignore[no-untyped-call]
                    configuration,
                    token_filename=str(SERVICE_ACCOUNT / "token"),
                    cert_filename=str(SERVICE_ACCOUNT / "ca.crt"),
                )
                own = (SERVICE_ACCOUNT / "namespace").read_text().strip() if not namespace else ""
            else:
                file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
                loader = await config.load_kube_config(
                    file, client_configuration=configuration, persist_config=False
                )
                context = loader.current_context or {}
                own = context.get("context", {}).get("namespace", "")
        except (config.ConfigException, OSError) as error:
            reason = f"no credentials for Kubernetes: {error}"
            raise ConnectorError(reason, permanent=True) from error
        return cls(ApiClient(configuration), namespace or own or "default")

    async def scale_of(self, path: str) -> Scale:
        """The scale of the object at `path`, such as `apps/v1/deployments/NAME`."""
        return await self._call("GET", self._scale(path), Scale)

    async def set_replicas(self, path: str, replicas: int) -> None:
        """Set the wanted replicas of the object at `path`."""
        await self._call("PATCH", self._scale(path), Scale, body={"spec": {"replicas": replicas}})

    async def pods(self, selector: str) -> list[Pod]:
        """The pods that match a label selector."""
        found: list[Pod] = []
        path, more = f"/api/v1/namespaces/{self.namespace}/pods", ""
        while True:
            query = {"labelSelector": selector, "limit": str(PAGE)}
            page = await self._call(
                "GET", path, _PodList, query={**query, "continue": more} if more else query
            )
            found += page.items
            more = page.metadata.continue_ or ""
            if not more:
                return found

    async def annotate(self, pod: str, key: str, value: str | None) -> None:
        """Set an annotation of a pod; None removes it. A pod that has gone is no error."""
        body = {"metadata": {"annotations": {key: value}}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}"
        await self._call("PATCH", path, Pod, body=body, missing=Pod(PodMetadata(pod)))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _scale(self, path: str) -> str:
        group, version, kind, name = path.split("/")
        return f"/apis/{group}/{version}/namespaces/{self.namespace}/{kind}/{name}/scale"

    async def _call(
        self,
        method: str,
        path: str,
        reply: type[T],
        body: object = None,
        query: dict[str, str] | None = None,
        missing: T | None = None,
    ) -> T:
        """Send a request; `missing` is the result if the object does not exist."""
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH
        url = f"{self._client.configuration.host}{path}"
        try:
            async with _reported(method, url):
                await self._client.update_params_for_auth(headers, [], ["BearerToken"])
                response = await self._client.request(
                    method,
                    url,
                    query_params=list((query or {}).items()),
                    headers=headers,
                    body=body,
                )
                return msgspec.json.decode(response.data, type=reply)
        except _Missing as error:
            if missing is not None:
                return missing
            raise ConnectorError(str(error), permanent=True) from error


class _Missing(Exception):
    """The API server does not know the object."""


@asynccontextmanager
async def _reported(method: str, url: str) -> AsyncIterator[None]:
    """Raise ConnectorError, or _Missing, for the failures of a request."""
    try:
        yield
    except ApiException as error:
        reason = f"{method} {url}: {error.status or ''} {_message(error)}"
        if error.status == 404:
            raise _Missing(reason) from error
        raise ConnectorError(reason, permanent=error.status in PERMANENT) from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectorError(f"cannot reach the Kubernetes API: {cause(error)}") from error
    except msgspec.MsgspecError as error:
        raise ConnectorError(f"{method} {url}: unexpected reply: {error}") from error


def _message(error: ApiException) -> str:
    """The message of the Status object that describes an error, else the HTTP reason."""
    try:
        status = msgspec.json.decode(error.body or b"", type=_Status)
    except msgspec.MsgspecError:
        status = _Status()
    return status.message or error.reason or ""
