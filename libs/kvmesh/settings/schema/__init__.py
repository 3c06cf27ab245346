"""Settings schema: type, bounds, default and description of every option of every service.

Each one is a key of the TOML file (`[router] policy = "kv"`), an environment variable
(`KVMESH_ROUTER_POLICY`) and a command-line flag (`kvmesh router --policy kv`).
"""

from kvmesh.settings.schema.common import *
from kvmesh.settings.schema.engines import *
from kvmesh.settings.schema.frontend import *
from kvmesh.settings.schema.indexer import *
from kvmesh.settings.schema.kvbm import *
from kvmesh.settings.schema.mesh import *
from kvmesh.settings.schema.planner import *
from kvmesh.settings.schema.router import *
from kvmesh.settings.schema.tools import *
from kvmesh.settings.schema.transfer import *
from kvmesh.settings.schema.worker import *


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
