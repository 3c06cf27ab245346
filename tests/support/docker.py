"""A Docker daemon with Compose: the machine's own, or one that a test of root starts in a folder.

The latter needs Linux, debootstrap, slirp4netns and nsenter, and no registry: Debian's packages are
its userland, and images are made of Debian's packages, too. It has namespaces of its own for mounts
and the network, so that its bridges, rules and ports are nobody else's.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".containers"
SUITE = "trixie"
DAEMON = ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "iptables", "iproute2")
PYTHON_NEEDS = (
    *("ca-certificates", "netbase", "libssl3t64", "libsqlite3-0", "libffi8"),
    *("libreadline8t64", "libncursesw6", "libexpat1"),
)
PATH = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
START_S, BUILD_S = 120.0, 3600.0


class NoDocker(Exception):
    """No daemon can run here; the message says why."""


@dataclass
class Docker:
    """Runs programs beside the daemon, in the checkout's root."""

    prefix: tuple[str, ...] = ()
    root: str = str(ROOT)
    own: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        stdin: IO[bytes] | None = None,
        timeout: float = 600.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with these variables and no others; its output is text."""
        variables = {"HOME": "/root", "PATH": "/usr/local/bin:/usr/bin:/usr/sbin", "PWD": self.root}
        variables.update(env or {})
        done = subprocess.run(
            [*self.prefix, "env", "-i", *(f"{k}={v}" for k, v in variables.items()), *command],
            cwd=None if self.prefix else ROOT,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{shlex.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done

    def client(self, *command: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine in the daemon's network, where the ports are published."""
        before = ("nsenter", "-t", str(self.own[0].pid), "-n") if self.own else ()
        return subprocess.run([*before, *command], capture_output=True, text=True, timeout=timeout)

    def has_image(self, image: str) -> bool:
        return not self.run("docker", "image", "inspect", image, check=False).returncode

    def close(self) -> None:
        for process in self.own:
            process.terminate()
        for process in self.own:
            process.wait(60)


def open_docker() -> Docker:
    """The machine's daemon if it is new enough, else one of the test's own; raises NoDocker."""
    checked = subprocess.run(["sh", ROOT / "compose" / "check.sh"], capture_output=True, text=True)
    if not checked.returncode:
        return Docker()
    reason = checked.stderr.strip()
    if sys.platform != "linux" or os.geteuid():
        raise NoDocker(f"{reason}; only root can start one for the tests")
    for program in ("debootstrap", "slirp4netns", "nsenter", "unshare"):
        if shutil.which(program) is None:
            raise NoDocker(f"{reason}; to start one for the tests needs {program}")
    try:
        return _start()
    except (OSError, subprocess.CalledProcessError, TimeoutError) as error:
        raise NoDocker(f"{reason}; none could be started for the tests: {error}") from error


def _start() -> Docker:
    userland = CACHE / "daemon"
    bootstrap(userland, DAEMON)
    for folder in ("src", "old", "var/lib/docker"):
        (userland / folder).mkdir(parents=True, exist_ok=True)
    data = CACHE / "data"
    data.mkdir(exist_ok=True)
    script = f"""
        set -e
        ip link set lo up
        mount --make-rprivate /
        mount --bind {userland} {userland}
        cd {userland}
        mount -t proc proc proc
        mount -t sysfs sysfs sys
        mount --rbind /sys/fs/cgroup sys/fs/cgroup
        mount --rbind /dev dev
        mount -t tmpfs tmpfs run
        mount -t tmpfs tmpfs tmp
        mount --bind {data} var/lib/docker
        mount --bind {ROOT} src
        echo nameserver 10.0.2.3 > etc/resolv.conf
        until ip link show tap0 > /dev/null 2>&1; do sleep 0.1; done
        pivot_root . old
        umount -l /old
        exec dockerd
    """
    with (CACHE / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            ["unshare", "-m", "-n", "bash", "-c", script], stdout=log, stderr=log
        )
    # it must be in its own network namespace before that gets its device
    deadline = time.monotonic() + START_S
    while os.readlink(f"/proc/{daemon.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        _still(daemon, deadline)
    network = subprocess.Popen(
        ["slirp4netns", "--configure", "--disable-host-loopback", str(daemon.pid), "tap0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    prefix = ("nsenter", "-t", str(daemon.pid), "-m", "-n", "-r", "--wdns=/src")
    docker = Docker(prefix, "/src", [daemon, network])
    try:
        while docker.run("docker", "version", check=False).returncode:
            _still(daemon, deadline)
    except BaseException:
        docker.close()
        raise
    return docker


def _still(daemon: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait a moment; raises TimeoutError, and OSError if the daemon has ended."""
    if daemon.poll() is not None:
        raise OSError(f"dockerd ended: {(CACHE / 'dockerd.log').read_text()[-500:]}")
    if time.monotonic() > deadline:
        raise TimeoutError("dockerd does not answer")
    time.sleep(0.1)


def bootstrap(folder: Path, packages: Sequence[str]) -> None:
    """A minimal Debian with these packages; kept for later runs."""
    if folder.exists():
        return
    folder.parent.mkdir(exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    include = f"--include={','.join(packages)}"
    subprocess.run(
        ["debootstrap", "--variant=minbase", include, SUITE, unfinished],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=BUILD_S,
    )
    for useless in ("var/cache/apt/archives", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(unfinished / useless, ignore_errors=True)
    unfinished.rename(folder)


def ensure_image(
    docker: Docker,
    image: str,
    packages: Sequence[str],
    *changes: str,
    prepare: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Pull an image, or make one of Debian's packages for a daemon that reaches no registry.

    `prepare` changes the folder that becomes the image; `changes` are lines of a Dockerfile.
    """
    if docker.has_image(image):
        return
    if not docker.run("docker", "pull", image, check=not docker.own).returncode:
        return
    folder = CACHE / image.replace("/", "-").replace(":", "-")
    bootstrap(folder, packages)
    prepare(folder)
    import_image(docker, folder, image, *changes)


def import_image(docker: Docker, folder: Path, image: str, *changes: str) -> None:
    """Make an image of a folder."""
    options = [part for change in (f"ENV {PATH}", *changes) for part in ("-c", change)]
    with subprocess.Popen(["tar", "c", "-C", folder, "."], stdout=subprocess.PIPE) as packed:
        docker.run("docker", "import", *options, "-", image, stdin=packed.stdout)


def ensure_python(docker: Docker, image: str) -> None:
    """The base of the services' image: pulled, or this Python on Debian's packages."""
    if docker.has_image(image) or not docker.run("docker", "pull", image, check=False).returncode:
        return
    folder = CACHE / "python"
    bootstrap(folder, PYTHON_NEEDS)
    local, version = folder / "usr" / "local", f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not (local / "bin" / version).exists():
        copied = [f"bin/{version}", f"lib/{version}", f"include/{version}"]
        copied += [f"lib/{f.name}" for f in (Path(sys.base_prefix) / "lib").glob("libpython*.so*")]
        skipped = ("--exclude=site-packages", "--exclude=test", "--exclude=config-*")
        with subprocess.Popen(
            ["tar", "c", *skipped, "-C", sys.base_prefix, *copied], stdout=subprocess.PIPE
        ) as packed:
            subprocess.run(["tar", "x", "-C", local], stdin=packed.stdout, check=True)
        # as this machine trusts: a proxy may have an authority of its own
        bundle = Path("/etc/ssl/certs/ca-certificates.crt")
        if bundle.exists():
            shutil.copy(bundle, folder / bundle.relative_to("/"))
        (folder / "etc" / "pip.conf").write_text(f"[global]\ncert = {bundle}\n")
        names = f"for name in python3 python; do ln -sf {version} /usr/local/bin/$name; done"
        script = f"ldconfig; {names}; python -m ensurepip; ln -sf pip3 /usr/local/bin/pip"
        subprocess.run(
            ["chroot", folder, "sh", "-c", script], check=True, stdout=subprocess.DEVNULL
        )
    import_image(docker, folder, image)
