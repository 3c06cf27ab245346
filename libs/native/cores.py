"""Translates the cores to C with mypyc, and tells CMake what to build of it (docs/adr/0010)."""

import sys
from pathlib import Path

from mypyc.build import mypycify

# Others derive from what is in the router's `policies` and `ticket`; Ctrl-C is seen between two
# events of the simulator's `agenda`; msgspec reads the workload's `model`. These stay interpreted.
CORES = {
    "libs/kvmesh/retention": ["*"],
    "services/indexer/kvmesh/indexer": ["holdings", "lives", "shards"],
    "services/router/kvmesh/router": [
        "core",
        "cost",
        "dispatcher",
        "overlaps",
        "predicted",
        "prefixes",
        "reports",
        "sequences",
        "trust",
        "view",
        "waiting",
        "workers",
    ],
    "services/worker/kvmesh/worker/mock": ["ahead", "core", "timing"],
    "services/worker/kvmesh/worker/scheduling": ["*"],
    "tools/kvmesh/simulator": [
        "fleet",
        "flight",
        "index",
        "ledger",
        "mesh",
        "prompts",
        "records",
        "routers",
    ],
    "tools/kvmesh/workload": ["sharing", "tree"],
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
        place = Path(*extension.name.split("."))
        sources = " ".join(f'"{source}"' for source in extension.sources)
        includes = " ".join(f'"{include}"' for include in extension.include_dirs)
        lines.append(f"add_core({place.parent} {place.name} SOURCES {sources} INCLUDES {includes})")
    Path(folder, "cores.cmake").write_text("\n".join(lines))


main(sys.argv[1])
