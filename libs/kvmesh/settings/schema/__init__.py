"""Settings schema: type, bounds, default and description of every option of every service.

Each one is a key of the TOML file (`[router] policy = "kv"`), an environment variable
(`KVMESH_ROUTER_POLICY`) and a command-line flag (`kvmesh router --policy kv`).
"""

from kvmesh.settings.schema.common import Section
from kvmesh.settings.schema.dashboard import DashboardSettings
from kvmesh.settings.schema.engines import (
    MockSettings,
    RemoteSettings,
    SglangSettings,
    TorchSettings,
    TrtllmSettings,
    VllmSettings,
)
from kvmesh.settings.schema.frontend import FrontendSettings
from kvmesh.settings.schema.indexer import IndexerSettings
from kvmesh.settings.schema.kvbm import KvbmSettings
from kvmesh.settings.schema.mesh import LogSettings, NatsSettings, ProcessSettings, StreamSettings
from kvmesh.settings.schema.oracle import OracleSettings
from kvmesh.settings.schema.planner import PlannerSettings
from kvmesh.settings.schema.router import RouterSettings
from kvmesh.settings.schema.tracing import TracingSettings
from kvmesh.settings.schema.transfer import TransferSettings, WeightsSettings
from kvmesh.settings.schema.up import UpSettings
from kvmesh.settings.schema.worker import WorkerSettings

__all__ = [
    "DashboardSettings",
    "FrontendSettings",
    "IndexerSettings",
    "KvbmSettings",
    "LogSettings",
    "MockSettings",
    "NatsSettings",
    "OracleSettings",
    "PlannerSettings",
    "ProcessSettings",
    "RemoteSettings",
    "RouterSettings",
    "Section",
    "Settings",
    "SglangSettings",
    "StreamSettings",
    "TorchSettings",
    "TracingSettings",
    "TransferSettings",
    "TrtllmSettings",
    "UpSettings",
    "VllmSettings",
    "WeightsSettings",
    "WorkerSettings",
]


class Settings(Section, frozen=True, kw_only=True):
    """The whole configuration, one attribute per section."""

    nats: NatsSettings = NatsSettings()
    streams: StreamSettings = StreamSettings()
    log: LogSettings = LogSettings()
    process: ProcessSettings = ProcessSettings()
    tracing: TracingSettings = TracingSettings()
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    indexer: IndexerSettings = IndexerSettings()
    worker: WorkerSettings = WorkerSettings()
    kvbm: KvbmSettings = KvbmSettings()
    planner: PlannerSettings = PlannerSettings()
    oracle: OracleSettings = OracleSettings()
    dashboard: DashboardSettings = DashboardSettings()
    mock: MockSettings = MockSettings()
    transfer: TransferSettings = TransferSettings()
    weights: WeightsSettings = WeightsSettings()
    torch: TorchSettings = TorchSettings()
    remote: RemoteSettings = RemoteSettings()
    vllm: VllmSettings = VllmSettings()
    sglang: SglangSettings = SglangSettings()
    trtllm: TrtllmSettings = TrtllmSettings()
    up: UpSettings = UpSettings()
