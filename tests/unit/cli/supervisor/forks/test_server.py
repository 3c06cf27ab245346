"""Forks in place of new programs; the supervisor of these tests is a program of its own."""

import json
import signal
import subprocess
import sys
from typing import Any

from support.wait import PATIENCE_S

SUPERVISOR = """
import json, os, signal, sys
from pathlib import Path
from kvmesh.cli.supervisor.forks.server import ServiceForks
from kvmesh.cli.supervisor.plan import ProcessSpec

def run(role):
    if role == "pause":
        signal.pause()
    if role == "cat":
        return len(sys.stdin.read())
    own = Path("/proc/self")
    print(json.dumps({
        "role": role,
        "imported": sys.modules["imported"],
        "argv": own.joinpath("cmdline").read_text().split("\\0"),
        "environ": own.joinpath("environ").read_text().split("\\0"),
        "variables": dict(os.environ),
        "files": len(list(own.joinpath("fd").iterdir())),
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }), flush=True)
    return 7

def prepare():
    sys.modules["imported"] = "before"

def end_of(role):
    reader, writer = os.pipe()
    argv = ("/usr/bin/python", "-m", "kvmesh.cli.main", role, "--name=ä")
    pid = forks.fork(ProcessSpec(role, role, argv, {"A": "b"}), writer)
    os.close(writer)
    if pid is None:
        return None
    with os.fdopen(reader) as output:
        said = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

extra = os.open("/dev/null", os.O_RDONLY)
forks = ServiceForks.start(prepare, run)
"""


def supervised(rest: str) -> Any:
    """The JSON that a supervisor prints after it has started its forks."""
    program = [sys.executable, "-c", SUPERVISOR + rest]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_fork_is_like_a_new_program() -> None:
    (status, said), parent = supervised('print(json.dumps([end_of("router"), os.getpid()]))')
    assert status == 7
    found = json.loads(said)
    assert found.pop("variables").items() >= {"A": "b"}.items()
    assert found == {
        "role": "router",
        "imported": "before",
        "argv": ["/usr/bin/python", "-m", "kvmesh.cli.main", "router", "--name=ä", ""],
        "environ": ["A=b", ""],
        "files": 4,  # one of them reads the folder
        "parent": parent,
        "session": True,
        "interrupt": True,
    }


def test_each_fork_begins_with_what_was_imported_and_no_input() -> None:
    ends = supervised('print(json.dumps([end_of("cat"), end_of("cat")]))')
    assert ends == [[0, ""], [0, ""]]


def test_a_server_that_is_gone_makes_no_process() -> None:
    rest = """
os.kill(forks._pid, signal.SIGKILL)
found = [end_of("cat"), end_of("cat")]
forks.close()
print(json.dumps(found))
"""
    assert supervised(rest) == [None, None]


def test_forks_outlive_their_server_and_die_with_their_supervisor() -> None:
    rest = """
pid = forks.fork(ProcessSpec("pause", "pause", ("python",), {}), 1)
forks.close()
os.kill(pid, 0)
print("forked", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", SUPERVISOR + rest]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert program.stdout.read() == b""  # the fork, which holds it, has ended, too
    assert program.returncode == -signal.SIGKILL
