"""Programs that stand in for an operator's script and for `docker compose`.

Each stores its workers in a JSON file beside it.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmesh.planner.connectors.command import CommandConnector
from kvmesh.planner.connectors.compose import ComposeConnector
from kvmesh.planner.connectors.interface import Connector
from kvmesh.planner.core.pools import Pool
from support.places.place import POOLS, TIMEOUT_S

COMMON = """#!{python}
import json, sys
from pathlib import Path
file = Path(__file__).with_name("state.json")
state = json.loads(file.read_text())
arguments = sys.argv[1:]
def fail(status, reason):
    print(reason, file=sys.stderr)
    sys.exit(status)
def resize(pool, number, stop=()):
    names = state["names"][pool]
    for name in [n for n in stop if n in names][: max(0, len(names) - number)]:
        names.remove(name)
    del names[number:]
    free = [n for i in range(1, 1000) if (n := f"kvmesh-{{pool}}-{{i}}") not in names]
    names += free[: number - len(names)]
def save():
    state["changes"] += 1
    file.write_text(json.dumps(state))
"""
COMMAND = """
if state["down"]:
    fail(3, "the cluster is gone")
if arguments == ["state"]:
    east = {{"wanted": len(state["names"]["east"]), "workers": state["names"]["east"]}}
    west = {{"wanted": len(state["names"]["west"]), "workers": state["names"]["west"]}}
    print(json.dumps({{"east": east, "west": west}}))
elif arguments[:1] == ["scale"]:
    split = arguments.index("--stop") if "--stop" in arguments else len(arguments)
    before = json.dumps(state)
    for each in arguments[1:split]:
        pool, _, number = each.partition("=")
        resize(pool, int(number), arguments[split + 1 :])
    if json.dumps(state) != before:
        save()
else:
    fail(2, "usage")
"""
DOCKER = """
if arguments[:1] != ["compose"]:
    fail(125, "unknown command")
arguments = arguments[1:]
options = {{}}
while arguments and arguments[0].startswith("-"):
    options[arguments[0]] = arguments[1]
    arguments = arguments[2:]
if not Path(options.get("-f", "")).is_file():
    fail(14, "open %s: no such file or directory" % options.get("-f"))
known = [n for n in state["names"] if options.get("--profile") == "*" or n != "west"]
command, arguments = arguments[0], arguments[1:]
if command == "config":
    if arguments != ["--services"]:
        fail(16, "unknown flag")
    print("\\n".join(known))
    sys.exit(0)
if state["down"]:
    fail(1, "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
            " Is the docker daemon running?")
if command == "ps":
    if arguments != ["--format", "json"]:
        fail(16, "unknown flag")
    containers = [{{"ID": "%012x" % hash(name), "Name": name, "Command": "kvmesh worker",
                   "Project": "kvmesh", "Service": pool, "State": "running", "Health": "healthy",
                   "ExitCode": 0, "Publishers": []}}
                  for pool in state["names"] for name in state["names"][pool]]
    containers.append({{"Name": "kvmesh-nats-1", "Service": "nats", "State": "running"}})
    containers.append({{"Name": "kvmesh-east-99", "Service": "east", "State": "removing"}})
    if state["old"]:
        print(json.dumps(containers))
    else:
        print("\\n".join(map(json.dumps, containers)))
elif command == "up":
    flags = [a for a in arguments if a.startswith("-")]
    services = [a for a in arguments if not a.startswith("-")]
    scales = [a.removeprefix("--scale=") for a in flags if a.startswith("--scale=")]
    rest = {{a for a in flags if not a.startswith("--scale=")}}
    if rest != {{"--detach", "--no-recreate", "--no-deps"}}:
        fail(16, "unknown flag")
    before = json.dumps(state)
    for service in services:
        if service not in known:
            fail(1, "no such service: " + service)
    for scale in scales:
        service, _, number = scale.partition("=")
        if service in services:
            resize(service, int(number))
    if json.dumps(state) != before:
        save()
else:
    fail(16, "unknown docker command: compose " + command)
"""


class _ScriptPlace:
    """Workers in the state file of a program in `folder`."""

    cut_timeout_s = TIMEOUT_S

    def __init__(self, folder: Path, name: str, body: str, pools: Sequence[Pool]) -> None:
        self.folder = folder
        self.pools = pools
        self.program = folder / name
        self.program.write_text((COMMON + body).format(python=sys.executable))
        self.program.chmod(0o755)
        names = {pool: [f"kvmesh-{pool}-{n + 1}" for n in range(k)] for pool, k in POOLS.items()}
        self._save(names=names, down=False, changes=0, old=False)

    @property
    def changes(self) -> int:
        return int(self._load()["changes"])

    async def start(self) -> None:
        """The state file exists already."""

    async def running(self, pool: str) -> list[str]:
        names: list[str] = self._load()["names"][pool]
        return names

    async def set(self, pool: str, number: int) -> None:
        names = self._load()["names"]
        names[pool] = [f"kvmesh-{pool}-{n + 1}" for n in range(number)]
        self._save(names=names)

    async def cut(self) -> None:
        self._save(down=True)

    async def close(self) -> None:
        """Nothing runs."""

    def _load(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return state

    def _save(self, **changed: object) -> None:
        file = self.folder / "state.json"
        state = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**state, **changed}))


class CommandPlace(_ScriptPlace):
    """A script for the connector `command`."""

    silence = "exited with status 3: the cluster is gone"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "fleet.py", COMMAND, [Pool(name) for name in POOLS])

    def connector(self, timeout_s: float = TIMEOUT_S) -> Connector:
        return CommandConnector(str(self.program), timeout_s)


class ComposePlace(_ScriptPlace):
    """A program `docker` on PATH; the service `west` has a profile. `old`: compose before 2.21."""

    silence = "Cannot connect to the Docker daemon"

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, old: bool = False) -> None:
        super().__init__(folder, "docker", DOCKER, [Pool("east"), Pool("west", target="west")])
        self._save(old=old)
        self.file = folder / "compose.yaml"
        self.file.write_text("services: {}\n")
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def connector(self, timeout_s: float = TIMEOUT_S) -> Connector:
        return ComposeConnector(self.file, self.pools, timeout_s)
