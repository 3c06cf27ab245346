"""The Helm chart and the kustomize base, against the published schemas of Kubernetes."""

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from support.chart import CHART, Manifest, base, rendered

from kvmesh.settings import variables

pytest.importorskip("helm_python", reason="no helm-python-sdk")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = ("1.31", "1.34", "1.37")
# Their schemas belong to other projects.
CUSTOM = ("LeaderWorkerSet", "ServiceMonitor")
EVERYTHING: dict[str, Any] = {
    "frontend": {"keysSecret": "keys"},
    "worker": {
        "modelsClaim": "models",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "settings": {"KVMESH_WORKER_ENGINE": "vllm", "KVMESH_VLLM_KVBM": "true"},
    },
    "kvbm": {"enabled": True},
    "planner": {"enabled": True, "settings": {"KVMESH_PLANNER_CONNECTOR": "kubernetes"}},
    "serviceMonitor": {"enabled": True},
    "networkPolicy": {"extraEgress": [{"ports": [{"protocol": "TCP", "port": 4317}]}]},
}
WORKERS = ("StatefulSet", "worker")
GROUPS: dict[str, Any] = {"worker": {"groupSize": 4, "followerCommand": ["vllm", "serve"]}}
VALUES = {"default": {}, "everything": EVERYTHING, "groups": GROUPS}


@pytest.fixture(params=VALUES)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(VALUES[request.param])


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """The name and template of each kind of pod."""
    for manifest in manifests:
        name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
        if manifest["kind"] == "LeaderWorkerSet":
            yield name, spec["leaderWorkerTemplate"]["leaderTemplate"]
        elif "template" in spec:
            yield name, spec["template"]


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_pods_of_groups_are_valid() -> None:
    group = next(each for each in rendered(GROUPS) if each["kind"] == "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 4
    for part in ("leaderTemplate", "workerTemplate"):
        for version in VERSIONS:
            pod = {"apiVersion": "v1", "kind": "Pod", **template[part]}
            kubernetes_validate.validate(pod, version, strict=True)


def test_helm_finds_nothing_wrong() -> None:
    import helm_python

    report = helm_python.lint(CHART, kube_version="v1.34.0")
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def test_settings_are_those_of_kvmesh(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests):
        for container in pod["spec"]["containers"]:
            given = [entry["name"] for entry in container["env"]]
            assert len(given) == len(set(given)), name
            assert set(given) <= variables().keys(), name


def test_every_service_is_probed_confined_and_has_time_to_stop(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests):
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        assert {"readinessProbe", "livenessProbe", "startupProbe"} <= container.keys(), name
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["enableServiceLinks"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        role = container["name"].upper()
        drain = float(env.get(f"KVMESH_{role}_DRAIN_TIMEOUT_S") or 0)
        linger = float(env.get(f"KVMESH_{role}_LINGER_S") or 0)
        assert spec["terminationGracePeriodSeconds"] >= drain + linger + 10, name
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}, name


def test_services_and_budgets_select_pods_that_exist(manifests: list[Manifest]) -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods(manifests)]
    for manifest in manifests:
        selector = manifest.get("spec", {}).get("selector") or {}
        wanted = selector.get("matchLabels", selector)
        if manifest["kind"] in ("Service", "PodDisruptionBudget"):
            assert any(wanted.items() <= each.items() for each in labels), manifest["metadata"]
    budgets = {m["metadata"]["name"] for m in manifests if m["kind"] == "PodDisruptionBudget"}
    assert {"frontend", "router", "indexer", "worker"} <= budgets


def test_a_planner_alone_sets_the_number_of_workers() -> None:
    def replicas(manifests: list[Manifest]) -> object:
        found = next(m for m in manifests if (m["kind"], m["metadata"]["name"]) == WORKERS)
        return found["spec"].get("replicas")

    assert replicas(rendered()) == 2
    assert replicas(rendered(EVERYTHING)) is None


def test_a_group_without_a_command_is_refused() -> None:
    with pytest.raises(Exception, match="set the command of an engine's further pods"):
        rendered({"worker": {"groupSize": 2}})


def test_the_base_is_the_chart() -> None:
    file = CHART.parent / "base" / "kvmesh.yaml"
    assert file.read_text() == base(), "run `make kubernetes`"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kustomize_builds_the_base() -> None:
    command = ["kubectl", "kustomize", str(CHART.parent / "base")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    built = list(yaml.safe_load_all(result.stdout))
    assert {manifest["metadata"]["namespace"] for manifest in built} == {"kvmesh"}
    assert len(built) == len(rendered())
