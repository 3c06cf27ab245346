"""Settings of `kvmesh up` and the dashboard."""

from pathlib import Path

from kvmesh.settings.schema.common import LOOPBACK, Amount, Count, Port, Seconds, Section


class DashboardSettings(Section, frozen=True, kw_only=True):
    """
    host: address to listen on
    port: port to listen on; 0 picks a free one
    name: stable name; empty derives one
    keys_file: TOML file of API keys, as of frontends; none: no key is needed
    keys_bucket: read API keys from the mesh's bucket
    allow_anonymous: listen beyond loopback without API keys

    Tuning:
    window_s: age of the oldest requests that it shows
    window_bytes: most memory for requests and their block hashes, in bytes
    max_viewers: pages open at once; further ones are refused
    whatif_s: longest capture, and longest simulation, of one “What if”
    """

    host: str = LOOPBACK
    port: Port = 8090
    name: str = ""
    keys_file: Path | None = None
    keys_bucket: bool = False
    allow_anonymous: bool = False
    window_s: Seconds = 900.0
    window_bytes: Count = 128 << 20
    max_viewers: Count = 64
    whatif_s: Seconds = 60.0


class UpSettings(Section, frozen=True, kw_only=True):
    """
    workers: worker processes
    prefill_workers: additional prefill workers for long prompts; 0: none
    kvbm: run a kvbm, which shares memory and disk for blocks among the workers
    planner: run a planner, which starts and stops workers as the load demands
    dashboard: run the dashboard, a web page with the state of the mesh
    max_workers: most workers of each pool that a planner may run; at least as many as the mesh
        starts with
    parked: further workers of each pool that wait, parked, for a promotion; with planner.pools its
        key parked counts
    asleep: most workers that sleep in place of being stopped; with planner.pools its key asleep
        counts
    frontends: frontend processes, on consecutive ports
    routers: router processes
    indexers: indexer processes
    state_dir: folder of the embedded NATS server's streams
    nats_port: port of the embedded NATS server; 0: a free one
    metrics_port: first of consecutive /metrics ports, one per process; 0: none
    reset_states: start with empty streams and no index snapshots

    Tuning:
    ready_timeout_s: longest time of a start without progress (a process that joins, another phase
        or line of a worker), before kvmesh up gives up
    stop_timeout_s: longest wait for a process to stop before it is killed
    """

    workers: Amount = 4
    prefill_workers: Amount = 0
    kvbm: bool = False
    planner: bool = False
    dashboard: bool = True
    max_workers: Count = 8
    parked: Amount = 0
    asleep: Amount = 0
    frontends: Amount = 1
    routers: Amount = 1
    indexers: Amount = 1
    state_dir: Path = Path(".kvmesh")
    nats_port: Port = 4222
    metrics_port: Port = 0
    ready_timeout_s: Seconds = 1800.0
    stop_timeout_s: Seconds = 10.0
    reset_states: bool = False
