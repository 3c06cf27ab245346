"""Facts that `kvmesh doctor` gathers; each may be missing, since NATS may be sick."""

from dataclasses import dataclass, field

from msgspec import Struct

from kvmesh.bus.connection.jetstream import StreamInfo
from kvmesh.bus.messages import ScalingDecision
from kvmesh.bus.streams.configuration import Difference
from kvmesh.cli.status.index_checks import RankCheck
from kvmesh.cli.status.report import MeshReport
from kvmesh.cli.status.served import WorkerCache

MAPPINGS = "subject mappings"  # a question that needs a user without permissions


class NatsServer(Struct, frozen=True, kw_only=True):
    """A server of the cluster that has replied.

    `ahead_s`: seconds of its clock before this machine's. `long_acks` is None if it does not tell
    which layout its reply subjects have (`js_ack_fc_v2`).
    """

    name: str
    version: str
    ahead_s: float
    long_acks: bool | None = None
    connections: int = 0


class UsedLimit(Struct, frozen=True):
    """Use of one limit. `setting` names it, with the unit bytes if `is_bytes`."""

    setting: str
    used: int
    limit: int
    is_bytes: bool = False

    @property
    def share(self) -> float:
        return self.used / self.limit


class Clock(Struct, frozen=True):
    """`ahead_s`: seconds by which messages of `process` are dated after the server stored them."""

    process: str
    ahead_s: float


class DiskSpace(Struct, frozen=True):
    """Bytes of the disk below `path` of this machine; `effect` is what happens once it is full."""

    owner: str
    path: str
    free: int
    total: int
    effect: str


class MonitoredServer(Struct, frozen=True):
    """JetStream of the server whose monitoring port is `url`, as far as it `stores` anything.

    It syncs its files every `sync_s` seconds, or at each message if `sync_always`; 0: unknown. It
    has stored `used` of `most` bytes.
    """

    url: str
    stores: bool
    sync_s: float
    sync_always: bool
    used: int
    most: int


class OpenFrontend(Struct, frozen=True):
    """A frontend that listens beyond its machine, at `url`."""

    instance: str
    url: str
    needs_key: bool


@dataclass
class Facts:
    """Facts about a mesh and its NATS servers.

    `servers` are `all_servers` of the cluster that reply, or the one of this connection. `unfit` is
    the reason why the server does not suit a mesh. `unanswered` gives the reason for
    each question without an answer, `refused` are those that this user may not ask. `absent` are
    streams that every mesh has and that do not exist; `leaderless` those that exist and do not
    answer, with the reason. `altered` are the settings of streams that do harm, by stream, and
    `differences` those from this command's settings. `others` are the namespaces of further meshes
    of the account. `lost` are subjects on which a probe did not arrive, `astray` those of streams,
    by stream, on which one did not reach its stream; None if this user could not probe. `moved` are
    subjects under which a stream gets the messages of another one. `caches` are
    what workers served lately, without their events if this user may not ask (`events_refused`).
    `plans` are the latest decision of planners about each model. `anonymous`: this connection has
    no credentials. `monitored` is what NATS's monitoring port tells, if it was asked, and
    `monitoring_fault` why it tells nothing. `frontends` are those that listen beyond their machine.
    """

    namespace: str
    server: str = ""
    version: str = ""
    clustered: bool = False
    max_payload: int = 0
    replicas: int = 1
    domain: str = ""
    unfit: str = ""
    unanswered: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    servers: list[NatsServer] = field(default_factory=list)
    all_servers: bool = False
    uses: list[UsedLimit] = field(default_factory=list)
    streams: dict[str, StreamInfo] | None = None
    absent: list[str] = field(default_factory=list)
    leaderless: dict[str, str] = field(default_factory=dict)
    altered: dict[str, list[str]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    lost: list[str] | None = None
    astray: dict[str, str] | None = None
    moved: dict[str, str] = field(default_factory=dict)
    clocks: list[Clock] = field(default_factory=list)
    report: MeshReport | None = None
    ranks: list[RankCheck] | None = None
    caches: list[WorkerCache] | None = None
    events_refused: bool = False
    plans: list[ScalingDecision] = field(default_factory=list)
    disks: list[DiskSpace] = field(default_factory=list)
    anonymous: bool = False
    monitored: MonitoredServer | None = None
    monitoring_fault: str = ""
    frontends: list[OpenFrontend] = field(default_factory=list)
