"""Settings of `kvmesh up`."""

from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Port, Seconds, Section


class UpSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "ready_timeout_s stop_timeout_s"
    workers: Annotated[int, Meta(ge=0, description="worker processes")] = 4
    prefill_workers: Annotated[
        int, Meta(ge=0, description="additional prefill workers for long prompts; 0: none")
    ] = 0
    kvbm: Annotated[
        bool,
        Meta(description="run a kvbm, which shares memory and disk for blocks among the workers"),
    ] = False
    planner: Annotated[
        bool, Meta(description="run a planner, which starts and stops workers as the load demands")
    ] = False
    oracle: Annotated[
        bool,
        Meta(description="run an oracle, which simulates candidate fleets for the planner"),
    ] = False
    dashboard: Annotated[
        bool, Meta(description="run the dashboard, a web page with the state of the mesh")
    ] = True
    max_workers: Annotated[
        Count,
        Meta(
            description="most workers of each pool that a planner may run; at least as many as the"
            " mesh starts with"
        ),
    ] = 8
    parked: Annotated[
        int,
        Meta(
            ge=0,
            description="further workers of each pool that wait, parked, for a promotion; with"
            " planner.pools its key parked counts",
        ),
    ] = 0
    asleep: Annotated[
        int,
        Meta(
            ge=0,
            description="most workers that sleep in place of being stopped; with planner.pools its"
            " key asleep counts",
        ),
    ] = 0
    frontends: Annotated[
        int, Meta(ge=0, description="frontend processes, on consecutive ports")
    ] = 1
    routers: Annotated[int, Meta(ge=0, description="router processes")] = 1
    indexers: Annotated[int, Meta(ge=0, description="indexer processes")] = 1
    state_dir: Annotated[Path, Meta(description="folder of the embedded NATS server's streams")] = (
        Path(".kvmesh")
    )
    nats_port: Annotated[
        Port, Meta(description="port of the embedded NATS server; 0: a free one")
    ] = 4222
    metrics_port: Annotated[
        Port, Meta(description="first of consecutive /metrics ports, one per process; 0: none")
    ] = 0
    ready_timeout_s: Annotated[
        Seconds,
        Meta(
            description="longest time of a start without progress (a process that joins, another"
            " phase or line of a worker), before kvmesh up gives up"
        ),
    ] = 1800.0
    stop_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for a process to stop before it is killed")
    ] = 10.0
    reset_states: Annotated[
        bool, Meta(description="start with empty streams and no index snapshots")
    ] = False
