"""Settings of the planner."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, field

from kvmesh.settings.schema.common import Count, Port, Seconds, Section, Weight

Promises = list[Annotated[str, Meta(pattern=r"^\S+$")]]


class PlannerSettings(Section, frozen=True, kw_only=True):
    """
    name: stable name; empty derives one
    connector: starts and stops workers; advisory only says what it would do
    pools: pools of equal workers, NAME[:KEY=VALUE,…] with the keys serves, min, max, cost, devices,
        model, target, profile, kind, parked and asleep (docs/connectors.md)
    max_devices: most devices of all pools together
    ttft: promised time to first token, [MODEL/][CLASS:]QUANTILE=TIME: p95=2s, batch:p90=1m; none:
        no promise
    itl: promised mean time between the tokens of a request, likewise
    queue: promised wait in the router's queue, likewise
    target: without any promise: keep queues empty, or keep workers busy
    startup_s: start-up time of a worker until the planner has seen one start
    down_cooldown_s: least time from any change of a pool to a removal
    zero_after_s: pools with min=0 shrink to nothing after so long without a request
    metrics_port: port of /metrics and /health; 0: none
    compose_file: compose: the file of the services that the pools name
    namespace: kubernetes: the namespace; empty: that of the planner's own pod
    command: command: a program, run with scale POOL=N … or state; docs/connectors.md describes its
        input and output

    Tuning:
    interval_s: time between decisions
    window_s: longest window of past requests that decisions consider
    up_cooldown_s: least time between two additions to a pool
    manual_hold_s: a pool that someone else resized is left alone for this long
    predictor: predictor of the arrivals: seasonal, kalman or constant
    connector_timeout_s: longest wait for the connector's place to accept a change
    """

    name: str = ""
    connector: Literal["advisory", "processes", "bucket", "compose", "kubernetes", "command"] = (
        "advisory"
    )
    pools: list[str] = field(default_factory=lambda: ["workers"])
    max_devices: Count | None = None
    ttft: Promises = []
    itl: Promises = []
    queue: Promises = []
    target: Literal["latency", "throughput"] = "latency"
    interval_s: Seconds = 5.0
    window_s: Seconds = 1800.0
    startup_s: Seconds = 60.0
    up_cooldown_s: Weight = 0.0
    down_cooldown_s: Weight = 60.0
    zero_after_s: Seconds = 300.0
    manual_hold_s: Weight = 900.0
    predictor: str = "seasonal"
    metrics_port: Port = 0
    compose_file: Path | None = None
    namespace: str = ""
    command: str = ""
    connector_timeout_s: Seconds = 30.0
