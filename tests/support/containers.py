"""A mesh of compose files in containers, and clients of it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from support.docker import Docker

T = TypeVar("T")
TRAFFIC = Path(__file__).with_name("container_traffic.py")
PATIENCE_S = 180.0  # for a container, on a machine that does much else
BUILDER = "credentials"  # ends once it has written the credentials


class ComposeMesh:
    """Runs `docker compose` with the project's file and more of the folder `compose`."""

    def __init__(
        self,
        docker: Docker,
        env: Mapping[str, str] | None = None,
        files: Sequence[str] = (),
        profiles: Sequence[str] = (),
    ) -> None:
        self.docker = docker
        self.env = dict(env or {})
        self.files = ["compose.yaml", *files]
        self.profiles = list(profiles)
        self.scales: dict[str, int] = {}

    def compose(self, *arguments: str, check: bool = True, timeout: float = 600) -> str:
        """The output of a command of Compose."""
        command = self._command(*arguments)
        return self.docker.run(*command, env=self.env, check=check, timeout=timeout).stdout

    def _command(self, *arguments: str) -> list[str]:
        files = (part for file in self.files for part in ("-f", f"compose/{file}"))
        profiles = (part for profile in self.profiles for part in ("--profile", profile))
        return ["docker", "compose", *files, *profiles, *arguments]

    def up(self, *more: str, **scales: int) -> None:
        """Return once every container is healthy."""
        self.scales.update(scales)
        scaled = (f"--scale={name}={number}" for name, number in self.scales.items())
        self.compose("up", "--detach", *scaled, *more)
        self.wait_healthy()

    def wait_healthy(self) -> None:
        """Return once every container but the builder's is healthy, or runs without a check."""

        def healthy() -> bool:
            services = [c for c in self.containers() if c["Service"] != BUILDER]
            assert all(c["Health"] in ("healthy", "") for c in services), self.states()
            assert all(c["State"] == "running" for c in services), self.states()
            return bool(services)

        until(healthy)

    def containers(self) -> list[dict[str, Any]]:
        """The rows of `docker compose ps`, ended containers included."""
        return [json.loads(line) for line in self.compose("ps", "-a", "--format=json").splitlines()]

    def states(self) -> dict[str, str]:
        return {c["Name"]: c["Status"] for c in self.containers()}

    def ids(self) -> dict[str, str]:
        """The id of each container but the builder's, by name."""
        return {c["Name"]: c["ID"] for c in self.containers() if c["Service"] != BUILDER}

    def names(self, service: str) -> list[str]:
        return sorted(c["Name"] for c in self.containers() if c["Service"] == service)

    def logs(self, *services: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", *services)

    def remove(self) -> None:
        self.compose("--profile=*", "down", "--volumes", "--timeout=20", "--remove-orphans")

    def kvmesh(self, *arguments: str, check: bool = True, user: str = "operator") -> str:
        """The output of a command of kvmesh in its own container, standard error included."""
        run = self._command("run", "--rm", "--no-TTY", "kvmesh", *arguments)
        done = self.docker.run(*run, env={**self.env, "KVMESH_USER": user}, check=check)
        return done.stdout + done.stderr

    @contextmanager
    def following(self, *arguments: str) -> Iterator[Callable[[], str]]:
        """Run a command of kvmesh that does not end; yields what it has printed so far."""
        run = self._command("run", "--rm", "--no-TTY", "--name=kvmesh-follower", "kvmesh")
        variables = {"HOME": "/root", "PATH": "/usr/local/bin:/usr/bin:/usr/sbin", **self.env}
        output = Path(f"/tmp/kvmesh-follower-{time.monotonic_ns()}")
        assigned = (f"{key}={value}" for key, value in variables.items())
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self.docker.prefix, "env", "-i", *assigned, *run, *arguments],
                stdout=file,
                stderr=file,
                cwd=None if self.docker.prefix else self.docker.root,
            )
        try:
            yield output.read_text
        finally:
            self.docker.run("docker", "stop", "kvmesh-follower", check=False)
            process.wait(60)
            output.unlink()

    def ask(self, *arguments: str, url: str = "http://127.0.0.1:8000/v1/models") -> Any:
        """The JSON of a request by curl; None if there is no answer."""
        done = self.docker.client("curl", "-sS", "--max-time", "60", *arguments, url)
        return json.loads(done.stdout) if not done.returncode else None

    def chat(self, *arguments: str, **more: Any) -> Any:
        """The answer to a short request."""
        models = self.ask(*arguments)["data"]
        message = {"role": "user", "content": "Name a colour, and say why it is yours. " * 20}
        body = {"model": models[0]["id"], "messages": [message], "max_tokens": 8, **more}
        url = "http://127.0.0.1:8000/v1/chat/completions"
        return self.ask(
            "-d", json.dumps(body), "-H", "content-type: application/json", *arguments, url=url
        )

    @contextmanager
    def traffic(self) -> Iterator[dict[str, Any]]:
        """Streams meanwhile; then fills in `sent`, `failed` and the reasons, and `gap_s`."""
        before = ("nsenter", "-t", str(self.docker.own[0].pid), "-n") if self.docker.own else ()
        process = subprocess.Popen(
            [*before, sys.executable, TRAFFIC], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        found: dict[str, Any] = {}
        try:
            time.sleep(2)
            yield found
            time.sleep(2)
        finally:
            output, _ = process.communicate(timeout=180)
        found.update(json.loads(output))


def until(check: Callable[[], T], timeout: float = PATIENCE_S) -> T:
    """Poll until the check holds and asserts nothing false."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if result := check():
                return result
            failure = repr(result)
        except AssertionError as error:
            failure = str(error)
        assert time.monotonic() < deadline, failure
        time.sleep(0.5)
