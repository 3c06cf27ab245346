"""The connector `kubernetes`: refusals, credentials, pods and their deletion cost."""

import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio
from support.places.kubernetes_server import COST, TOKEN, KubernetesServer

from kvmesh.cli.credentials.authority import Authority
from kvmesh.planner.connectors import kubernetes_api
from kvmesh.planner.connectors.interface import ConnectorError, PoolState
from kvmesh.planner.connectors.kubernetes import KubernetesConnector
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.errors import PlannerConfigError

TIMEOUT_S = 30.0


@pytest_asyncio.fixture
async def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubernetesServer]:
    server = KubernetesServer("inference")
    await server.start()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def connector(server: KubernetesServer) -> AsyncIterator[KubernetesConnector]:
    server.add("deployment", "a", 3)
    connector = KubernetesConnector("", [Pool("a")], TIMEOUT_S)
    await connector.open()
    yield connector
    await connector.close()


async def failure(connector: KubernetesConnector) -> ConnectorError:
    with pytest.raises(ConnectorError) as caught:
        await connector.state()
    await connector.close()
    return caught.value


@pytest.mark.parametrize(
    ("status", "message", "permanent"),
    [
        (403, 'deployments.apps "a" is forbidden', True),
        (409, "the object has been modified", False),
        (429, "too many requests", False),
        (500, "etcdserver: request timed out", False),
    ],
)
async def test_a_refusal_carries_the_servers_message(
    server: KubernetesServer,
    connector: KubernetesConnector,
    status: int,
    message: str,
    permanent: bool,
) -> None:
    server.refuse = (status, message)
    error = await failure(connector)
    assert str(error).endswith(f"/deployments/a/scale: {status} {message}")
    assert error.permanent == permanent


async def test_a_missing_workload_is_permanent(server: KubernetesServer) -> None:
    error = await failure(KubernetesConnector("", [Pool("b")], TIMEOUT_S))
    assert 'deployments.apps "b" not found' in str(error)
    assert error.permanent


async def test_the_namespace_of_the_settings_counts_before_that_of_the_context(
    server: KubernetesServer,
) -> None:
    error = await failure(KubernetesConnector("other", [Pool("a")], TIMEOUT_S))
    assert 'forbidden in the namespace "other"' in str(error)


async def test_a_wrong_token_is_refused(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path, token="wrong")))
    error = await failure(KubernetesConnector("", [Pool("a")], TIMEOUT_S))
    assert "401 Unauthorized" in str(error)
    assert error.permanent


@pytest.fixture
def service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that Kubernetes gives to a pod, with a certificate for the server beside them."""
    now = datetime.now(UTC)
    authority = Authority.create("cluster", now)
    pair = authority.issue("api", ["127.0.0.1"], now, 1)
    (tmp_path / "cert.pem").write_bytes(pair.certificate)
    (tmp_path / "key.pem").write_bytes(pair.key)
    (tmp_path / "ca.crt").write_bytes(authority.pair.certificate)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("inference\n")
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", tmp_path)
    return tmp_path


async def test_a_pod_uses_its_service_account(
    service_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(service_account / "cert.pem", service_account / "key.pem")
    server = KubernetesServer("inference")
    server.add("deployment", "a", 2)
    await server.start(tls)
    host, _, port = server.url.removeprefix("https://").partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    connector = KubernetesConnector("", [Pool("a")], TIMEOUT_S)
    assert (await connector.state())["a"].wanted == 2
    await connector.close()
    other = Authority.create("other", datetime.now(UTC))
    (service_account / "ca.crt").write_bytes(other.pair.certificate)
    error = await failure(KubernetesConnector("", [Pool("a")], TIMEOUT_S))
    assert "cannot reach the Kubernetes API" in str(error)
    assert "certificate" in str(error).lower()
    (service_account / "token").unlink()
    error = await failure(KubernetesConnector("", [Pool("a")], TIMEOUT_S))
    assert "no credentials for Kubernetes: Service token file does not exist" in str(error)
    await server.stop()


async def test_without_credentials_the_error_is_permanent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    error = await failure(KubernetesConnector("", [Pool("a")], TIMEOUT_S))
    assert str(error).startswith("no credentials for Kubernetes: ")
    assert error.permanent


async def test_a_silent_server_is_an_error_after_the_timeout(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("deployment", "a", 1)
    server.hold()
    connector = KubernetesConnector("", [Pool("a")], 0.2)
    assert "does not reply within 0.2 s" in str(await failure(connector))


async def test_the_marks_of_a_shrink_are_those_of_its_names(
    server: KubernetesServer, connector: KubernetesConnector
) -> None:
    workload = server.workloads["deployment", "a"]
    names = (await connector.state())["a"].workers
    pending = workload.pods[names[2]]
    pending["status"]["phase"] = "Pending"  # removed before pods of any cost
    await connector.scale({"a": 2}, stop=[names[0], "a-gone"])
    assert (await connector.state())["a"].workers == (names[1], names[0])
    await connector.scale({"a": 1}, stop=[names[1]])
    left = workload.pods[names[0]]["metadata"]
    assert COST not in left.get("annotations", {})
    assert (await connector.state())["a"] == PoolState(1, (names[0],))


async def test_pods_that_have_ended_do_not_count(
    server: KubernetesServer, connector: KubernetesConnector
) -> None:
    workload = server.workloads["deployment", "a"]
    names = (await connector.state())["a"].workers
    workload.pods[names[0]]["status"]["phase"] = "Failed"
    assert (await connector.state())["a"] == PoolState(3, names[1:])


async def test_a_pod_that_goes_meanwhile_stops_no_change(
    server: KubernetesServer, connector: KubernetesConnector
) -> None:
    names = (await connector.state())["a"].workers
    server.vanish.add(names[0])
    await connector.scale({"a": 1}, stop=names[:2])
    assert server.workloads["deployment", "a"].replicas == 1


async def test_a_leader_worker_set_counts_its_leaders(server: KubernetesServer) -> None:
    workload = server.add("leaderworkerset", "big", 2)
    assert len(workload.pods) == 4
    pool = Pool("big", target="leaderworkerset/big")
    connector = KubernetesConnector("", [pool], TIMEOUT_S)
    assert await connector.state() == {"big": PoolState(2, ("big-0", "big-1"))}
    assert not connector.chooses
    await connector.close()


async def test_an_unknown_pool_is_refused(connector: KubernetesConnector) -> None:
    with pytest.raises(ConnectorError, match="unknown pool z"):
        await connector.scale({"a": 1, "z": 1})


@pytest.mark.parametrize(
    "target", ["a", "pod/a", "deployment/", "deployment/A", "deployment/a/b", "Deployment/a"]
)
def test_a_target_of_another_form_is_refused(target: str) -> None:
    with pytest.raises(PlannerConfigError, match=f"target {target} is none of deployment/NAME"):
        KubernetesConnector("", [Pool("a", target=target)], TIMEOUT_S)


def test_only_deployments_let_the_connector_choose() -> None:
    deployments = [Pool("a"), Pool("b", target="deployment/x")]
    assert KubernetesConnector("", deployments, TIMEOUT_S).chooses
    mixed = [*deployments, Pool("c", target="statefulset/y")]
    assert not KubernetesConnector("", mixed, TIMEOUT_S).chooses
