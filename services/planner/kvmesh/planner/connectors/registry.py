"""The connectors by name."""

from collections.abc import Sequence

from kvmesh.bus.client import Bus
from kvmesh.planner.connectors.advisory import AdvisoryConnector
from kvmesh.planner.connectors.bucket import BucketConnector
from kvmesh.planner.connectors.command import CommandConnector
from kvmesh.planner.connectors.compose import ComposeConnector
from kvmesh.planner.connectors.interface import Connector
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.settings.schema import PlannerSettings


def create_connector(
    settings: PlannerSettings, bus: Bus, pools: Sequence[Pool], planner: str = ""
) -> Connector:
    """The connector that the settings name, not yet open; `planner` is this process's instance.

    Raises PlannerConfigError if the settings lack something that it needs.
    """
    timeout_s = settings.connector_timeout_s
    match settings.connector:
        case "advisory":
            return AdvisoryConnector()
        case "bucket" | "processes":
            return BucketConnector(bus, timeout_s, planner)
        case "command":
            return CommandConnector(settings.command, timeout_s)
        case "compose":
            if settings.compose_file is None:
                raise PlannerConfigError("the connector compose needs planner.compose_file")
            return ComposeConnector(settings.compose_file, pools, timeout_s)
        case "kubernetes":
            try:
                from kvmesh.planner.connectors.kubernetes import KubernetesConnector
            except ModuleNotFoundError as error:
                raise PlannerConfigError(
                    f"the connector kubernetes needs the extra kubernetes: no module {error.name}"
                ) from error
            return KubernetesConnector(settings.namespace, pools, settings.connector_timeout_s)
