"""The process that compiles a constraint before the engine does, in a copy that may die of it.

Some constraints of a few hundred characters take minutes or overflow the stack, and a library's
call can be neither stopped nor survived. What passes here, the engine can compile as well. The
process loads once what compiling needs, and forks for each constraint.
"""

import os
import resource
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import NoReturn

import msgspec

from kvmesh.bus.messages import Guided

MOST_BYTES = 1 << 30
STACK_BYTES = 4 << 20  # less than a thread of an engine has
MOST_SAID = 1000  # characters of a reason
SOON_S = 0.25  # of CPU time: what takes longer gives way to everything else
NICENESS = 10
LENGTH_BYTES = 4
READ_BYTES = 1 << 16


class Trial(msgspec.Struct):
    """A constraint to be tried; without one, nobody waits for the verdict of this number."""

    number: int
    guided: Guided | None = None


class Verdict(msgspec.Struct):
    """Why a constraint cannot be followed, empty if it can; and the bytes that it takes.

    `ended` is what ended the process that tried it. `started` says that the trial has begun, and no
    more; number 0 says that trials can begin.
    """

    number: int
    reason: str = ""
    size: int = 0
    ended: str = ""
    started: bool = False


_encode = msgspec.msgpack.Encoder().encode
_trial = msgspec.msgpack.Decoder(Trial)
CompileConstraint = Callable[[Guided], object]


def framed(message: Trial | Verdict) -> bytes:
    """A message as it is sent: its length first."""
    data = _encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def unframed(data: bytearray) -> Iterator[bytes]:
    """Take the messages that are whole out of `data`."""
    while len(data) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
        if len(data) < end:
            return
        yield bytes(data[LENGTH_BYTES:end])
        del data[:end]


class _Fork:
    """A copy of this process that tries one constraint, and what it has said so far."""

    def __init__(self, number: int, pid: int, pipe: int) -> None:
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.output = bytearray()

    def collect(self) -> bytes:
        """Its verdict, framed, once it has closed its pipe."""
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status == 0:
            return bytes(self.output)
        ended = signal.Signals(-status).name if status < 0 else f"status {status}"
        return framed(Verdict(self.number, ended=ended))


class TrialServer:
    """Tries what comes on stdin until it ends, for `seconds` of CPU time each.

    `make` returns what it has made of a constraint, or raises why it cannot.
    """

    def __init__(self, make: CompileConstraint, seconds: float) -> None:
        self._compile = make
        self._seconds = seconds
        self._output = os.dup(1)
        os.dup2(2, 1)  # nothing else is written among the verdicts
        self._input = bytearray()
        self._forks: dict[int, _Fork] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._selector.register(0, selectors.EVENT_READ)
        self._write(framed(Verdict(0)))
        while True:
            for key, _ in self._selector.select():
                fork: _Fork | None = key.data
                if fork is not None:
                    self._read_verdict(fork)
                elif not self._read_trials():
                    return

    def _read_trials(self) -> bool:
        """Begin and end trials as the worker wants; False once it is gone."""
        data = os.read(0, READ_BYTES)
        self._input += data
        for message in unframed(self._input):
            trial = _trial.decode(message)
            if trial.guided is not None:
                self._fork(trial.number, trial.guided)
            elif trial.number in self._forks:
                os.kill(self._forks[trial.number].pid, signal.SIGKILL)
        if not data:
            for fork in self._forks.values():
                os.kill(fork.pid, signal.SIGKILL)
        return bool(data)

    def _fork(self, number: int, guided: Guided) -> None:
        pipe, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(0)
            os.close(self._output)
            _try(self._compile, Trial(number, guided), self._seconds, end)
        os.close(end)
        fork = self._forks[number] = _Fork(number, pid, pipe)
        self._selector.register(pipe, selectors.EVENT_READ, fork)
        self._write(framed(Verdict(number, started=True)))

    def _read_verdict(self, fork: _Fork) -> None:
        data = os.read(fork.pipe, READ_BYTES)
        fork.output += data
        if not data:
            self._selector.unregister(fork.pipe)
            del self._forks[fork.number]
            self._write(fork.collect())

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._output, data) :]


def _try(make: CompileConstraint, trial: Trial, seconds: float, pipe: int) -> NoReturn:
    """In the fork: try it within bounds, say what came of it, and end whatever still runs."""
    silence = os.open(os.devnull, os.O_WRONLY)  # else constraints could fill the log
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    most = _bytes("VmData") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (ceil(seconds), ceil(seconds)))
    verdicts: list[Verdict] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(_tried(make, trial)))
    thread.start()
    while thread.is_alive() and time.process_time() < SOON_S:
        thread.join(SOON_S)
    if thread.is_alive():
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task), NICENESS)
        thread.join()
    if not verdicts:
        os._exit(1)
    os.write(pipe, framed(verdicts[0]))
    os._exit(0)


def _tried(make: CompileConstraint, trial: Trial) -> Verdict:
    assert trial.guided is not None
    before = _bytes("VmRSS")
    try:
        made = make(trial.guided)  # kept until its size is known
    except MemoryError:
        return Verdict(trial.number, ended="MemoryError")
    except Exception as error:  # engines raise anything
        return Verdict(trial.number, str(error)[:MOST_SAID] or type(error).__name__)
    size = max(len(trial.guided.value), _bytes("VmRSS") - before)
    del made
    return Verdict(trial.number, size=size)


def _bytes(name: str) -> int:
    """A size of this process that Linux tells."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0
