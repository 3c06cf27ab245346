"""Settings of the planner."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from kvmesh.settings.schema.common import Port, Seconds, Section

Promises = list[Annotated[str, Meta(pattern=r"^\S+$")]]


class PlannerSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "interval_s window_s up_cooldown_s manual_hold_s predictor oracle_budget_s "
        "connector_timeout_s"
    )
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    connector: Annotated[
        Literal["advisory", "processes", "bucket", "compose", "kubernetes", "command"],
        Meta(description="starts and stops workers; advisory only says what it would do"),
    ] = "advisory"
    pools: Annotated[
        list[str],
        Meta(
            description="pools of equal workers, NAME[:KEY=VALUE,…] with the keys serves, min, max,"
            " cost, devices, model, target, profile, kind, parked and asleep (docs/connectors.md)"
        ),
    ] = field(default_factory=lambda: ["workers"])
    max_devices: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="most devices of all pools together")
    ] = None
    ttft: Annotated[
        Promises,
        Meta(
            description="promised time to first token, [MODEL/][CLASS:]QUANTILE=TIME: p95=2s,"
            " batch:p90=1m; none: no promise"
        ),
    ] = []
    itl: Annotated[
        Promises, Meta(description="promised mean time between the tokens of a request, likewise")
    ] = []
    queue: Annotated[
        Promises, Meta(description="promised wait in the router's queue, likewise")
    ] = []
    target: Annotated[
        Literal["latency", "throughput"],
        Meta(
            description="without any promise: keep queues empty, or keep workers busy",
        ),
    ] = "latency"
    interval_s: Annotated[Seconds, Meta(description="time between decisions")] = 5.0
    window_s: Annotated[
        Seconds, Meta(description="longest window of past requests that decisions consider")
    ] = 1800.0
    startup_s: Annotated[
        Seconds, Meta(description="start-up time of a worker until the planner has seen one start")
    ] = 60.0
    up_cooldown_s: Annotated[
        float, Meta(ge=0, description="least time between two additions to a pool")
    ] = 0.0
    down_cooldown_s: Annotated[
        float, Meta(ge=0, description="least time from any change of a pool to a removal")
    ] = 60.0
    zero_after_s: Annotated[
        Seconds,
        Meta(description="pools with min=0 shrink to nothing after so long without a request"),
    ] = 300.0
    manual_hold_s: Annotated[
        float,
        Meta(ge=0, description="a pool that someone else resized is left alone for this long"),
    ] = 900.0
    predictor: Annotated[
        str, Meta(description="predictor of the arrivals: seasonal, kalman or constant")
    ] = "seasonal"
    oracle_budget_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="time that an oracle may take to simulate candidate fleets; 0: none is"
            " asked",
        ),
    ] = 0.0
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
    compose_file: Annotated[
        Path | None, Meta(description="compose: the file of the services that the pools name")
    ] = None
    namespace: Annotated[
        str, Meta(description="kubernetes: the namespace; empty: that of the planner's own pod")
    ] = ""
    command: Annotated[
        str,
        Meta(
            description="command: a program, run with scale POOL=N … or state; docs/connectors.md"
            " describes its input and output"
        ),
    ] = ""
    connector_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for the connector's place to accept a change")
    ] = 30.0
