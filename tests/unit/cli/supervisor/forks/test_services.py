"""Services of several roles in one process."""

import subprocess
import sys

from support.wait import PATIENCE_S

PROGRAM = """
import sys
from prometheus_client import REGISTRY
from kvmesh.cli.supervisor.forks import services

def exported():
    names = {metric.name.split("_")[1] for metric in REGISTRY.collect() if "kvmesh" in metric.name}
    return sorted(names & {"router", "indexer", "frontend", "worker"})

def run_role(role, settings):
    print(role, settings.router.policy, exported())
    return 3

services.run_role = run_role
roles = ("indexer", "router", "worker", "frontend")
services.import_services([f"kvmesh.{role}.service" for role in roles])
print(exported())
print(services.run_fork("router"))
"""


def test_a_fork_exports_its_metrics_alone() -> None:
    env = {"KVMESH_ROUTER_POLICY": "random"}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, env=env)
    assert done.stdout.splitlines() == ["[]", "router random ['router']", "3"], done.stderr
