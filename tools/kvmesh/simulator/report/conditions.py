"""The settings of a run as rows of text: fleet, speed, seed, network and faults."""

from collections.abc import Iterator

import msgspec

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.nodes.options import NodeOptions
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.report.tiers import GIB
from kvmesh.step_times.profile import StepProfile
from kvmesh.worker.engines.mock.pace import PaceOptions

DEFAULTS = RouterSettings()


def conditions(options: SimulationOptions) -> Iterator[tuple[str, str]]:
    """Pairs of a name and a value; settings of the router only if they are not the defaults."""
    yield "policy", options.router.policy
    for number, group in enumerate(options.workers):
        yield "workers" if not number else "and", _group(group)
    if options.nodes is not None:
        yield "nodes", _nodes(options.nodes)
    yield "tokens per block", f"{options.block_size:,}"
    yield "routers", f"{options.replicas:,}"
    yield "speed of arrivals", f"{options.speed:g} ×"
    yield "seed", str(options.seed)
    network = options.network
    yield "KV events", f"{network.kv_events:g} s late, {network.event_loss:.1%} of batches lost"
    if options.replicas > 1:
        yield "router replicas", f"{network.replicas:g} s late"
    if options.faults:
        yield "faults", ", ".join(f"{f.kind}:{f.worker}@{f.time:g}" for f in options.faults)
    if options.autoscaler is not None:
        yield "planner", f"workers start in {options.startup_s:g} s"
    for name in RouterSettings.__struct_fields__:
        value = getattr(options.router, name)
        if name != "policy" and value != getattr(DEFAULTS, name):
            shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            yield f"router.{name}", shown


def _nodes(nodes: NodeOptions) -> str:
    links = nodes.links
    parts = [
        f"{nodes.count:,}, each with {nodes.host_bytes / GIB:,.1f} GiB of memory",
        f"{nodes.disk_bytes / GIB:,.1f} GiB of disk at {links.disk / 1e9:g} GB/s",
        f"{links.host / 1e9:g} GB/s to each engine",
        *([f"{links.network / 1e9:g} GB/s between nodes"] if nodes.peers else []),
        *(
            [f"a remote store of {nodes.remote_bytes / GIB:,.1f} GiB at {links.store / 1e9:g} GB/s"]
            if nodes.remote_bytes
            else []
        ),
    ]
    return ", ".join(parts)


def _group(group: WorkerOptions) -> str:
    core, tiers, limits = group.core, group.core.tiers, group.core.limits
    profile = core.model.name if isinstance(core.model, StepProfile) else ""
    serves = "" if group.serves == "aggregated" else f" for {group.serves}"
    parts = [
        f"{group.count:,}{serves}, each with {core.blocks:,} blocks",
        f"{tiers.host_blocks:,} in host memory",
        f"{tiers.disk_blocks:,} on disk",
        f"{limits.max_sequences:,} sequences and {limits.max_batched_tokens:,} tokens a step",
        f"step times of {profile or 'the mock engine'}",
        *([f"{core.speedup:g} × as fast"] if core.speedup != 1 else []),
        *_pace(core.pace),
    ]
    return ", ".join(parts)


def _pace(pace: PaceOptions) -> Iterator[str]:
    if pace.slow_prefill != 1:
        yield f"{pace.slow_prefill:g} × as long for prompts"
    if pace.slow_decode != 1:
        yield f"{pace.slow_decode:g} × as long for output"
    if pace.noise != 1:
        spells = f"spells of {pace.noise_s:g} s after {pace.calm_s:g} s"
        yield f"{pace.noise:g} × as long beside a noisy neighbour, in {spells}"
    if pace.heat != 1:
        yield f"up to {pace.heat:g} × as long when hot, within {pace.heat_s:g} s"
