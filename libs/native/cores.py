"""Translates the cores to C with mypyc and lists the sources for CMake (docs/adr/0010)."""

import sys
from pathlib import Path

from mypyc.build import mypycify

# These stay interpreted: the router's `policies.base` and `ticket`, since other classes derive from
# theirs; the simulator's `virtual_clock`, since Ctrl-C is seen between two of its events; and the
# workload's `model`, which msgspec reads.
CORES = {
    "libs/kvmesh/placement_rules": ["holding"],
    "libs/kvmesh/retention": ["*"],
    "libs/kvmesh/returns": ["*"],
    "libs/kvmesh/step_times": ["interface"],
    "services/indexer/kvmesh/indexer": ["incarnations", "rank_state", "removed_blocks", "shards"],
    "services/router/kvmesh/router/placement": ["choice", "learning", "policy_runner", "router"],
    "services/router/kvmesh/router/waiting": [
        "common_queue",
        "fair_order",
        "free_capacity",
        "gathering",
        "held_prompts",
        "queue",
        "queue_entries",
    ],
    "services/router/kvmesh/router/scoring": ["candidates", "cost", "overlaps", "possible_hits"],
    "services/router/kvmesh/router/state": [
        "active_sequences",
        "engine_reports",
        "predicted_prefixes",
        "prefix_tree",
        "rank_table",
        "running_prefills",
    ],
    "services/worker/kvmesh/worker/enginecore": ["*"],
    "services/worker/kvmesh/worker/engines/mock": [
        "core",
        "decode_plan",
        "node_tiers",
        "pace",
        "timing",
    ],
    "tools/kvmesh/simulator": [
        "active_round",
        "cache_accounting",
        "fleet",
        "index",
        "mesh",
        "prompts",
        "records",
        "routers",
    ],
    "tools/kvmesh/workload": ["tree"],
    "tools/kvmesh/workload/analysis": ["sharing"],
}


def files() -> list[str]:
    """The files of the cores, from the project's root."""
    return [
        str(file)
        for folder, names in CORES.items()
        for name in names
        for file in sorted(Path(folder).glob(f"{name}.py"))
        if file.stem != "__init__"
    ]


def main(folder: str) -> None:
    """Write C files and `cores.cmake` to a folder."""
    options = ["--config-file", "pyproject.toml", "--follow-imports", "silent"]
    lines = []
    for extension in mypycify([*options, *files()], target_dir=folder, group_name="kvmesh"):
        path = Path(*extension.name.split("."))
        sources = " ".join(f'"{source}"' for source in extension.sources)
        includes = " ".join(f'"{include}"' for include in extension.include_dirs)
        lines.append(f"add_core({path.parent} {path.name} SOURCES {sources} INCLUDES {includes})")
    Path(folder, "cores.cmake").write_text("\n".join(lines))


main(sys.argv[1])
