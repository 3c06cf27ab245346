"""A connector of your own: runs the workers of a planner's pool as processes of this machine.

A planner with `--connector command --command "python examples/fleet_program.py"` runs it as

    fleet_program.py scale workers=3 [--stop NAME …]    start or stop workers; return once accepted
    fleet_program.py state                              print the pool's number and the names

Workers take their settings from the environment, and log to the folder FLEET_DIR.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("FLEET_DIR", "/tmp/kvmesh-fleet"))
POOL = "workers"


def running() -> dict[str, int]:
    """The process id of each worker that runs, by name."""
    found = {}
    for file in sorted(FOLDER.glob("worker-*.pid")):
        pid = int(file.read_text())
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            file.unlink()
        else:
            found[file.stem] = pid
    return found


def start(name: str) -> None:
    """Start a worker in a session of its own, so that it outlives this program."""
    command = [sys.executable, "-m", "kvmesh", "worker", "--name", name]
    with (FOLDER / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    (FOLDER / f"{name}.pid").write_text(str(process.pid))


def stop(name: str, pid: int) -> None:
    """Have a worker finish its requests and leave; it does not count from now on."""
    os.kill(pid, signal.SIGTERM)
    (FOLDER / f"{name}.pid").unlink()


def scale(wanted: int, first: list[str]) -> None:
    """Run `wanted` workers. Where some must go, those named `first` go first, then the newest."""
    found = running()
    free = (f"worker-{n}" for n in range(wanted + len(found)) if f"worker-{n}" not in found)
    for name in [next(free) for _ in range(wanted - len(found))]:
        start(name)
    surplus = max(len(found) - wanted, 0)
    others = [name for name in reversed(found) if name not in first]
    for name in [*(name for name in first if name in found), *others][:surplus]:
        stop(name, found[name])


def main(action: str, *arguments: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    if action == "scale":
        pools = [each for each in arguments if "=" in each]
        first = list(arguments[len(pools) + 1 :])  # behind --stop
        for pool, _, number in (each.partition("=") for each in pools):
            if pool != POOL:
                sys.exit(f"there is no pool {pool}")
            scale(int(number), first)
    names = list(running())
    print(json.dumps({POOL: {"wanted": len(names), "workers": names}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
