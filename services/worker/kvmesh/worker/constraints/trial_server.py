"""Child process that compiles constraints before the engine does, each in a fork that may die.

Some constraints of a few hundred characters take minutes or overflow the stack, and a library call
can be neither stopped nor survived. A constraint that compiles here compiles in the engine too. The
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

from kvmesh.bus.messages import Guided, MessageDecoder

MAX_BYTES = 1 << 30
STACK_BYTES = 4 << 20  # less than the stack of an engine's thread
MAX_REASON = 1000  # characters of a reason
NORMAL_PRIORITY_S = 0.25  # of CPU time, then the trial runs at low priority
NICENESS = 10
LENGTH_BYTES = 4
READ_BYTES = 1 << 16


class Trial(msgspec.Struct):
    """A constraint to try; without `guided`, the trial of this number is cancelled."""

    number: int
    guided: Guided | None = None


class Verdict(msgspec.Struct):
    """The result of a trial: `reason` for a refusal, else empty; `size` of the constraint in bytes.

    `ended` is the signal or status that ended the fork. `started` says only that the trial has
    begun; with number 0, that the process is ready for trials.
    """

    number: int
    reason: str = ""
    size: int = 0
    ended: str = ""
    started: bool = False


_encode = msgspec.msgpack.Encoder().encode
_trial = MessageDecoder(Trial)
CompileConstraint = Callable[[Guided], object]


def framed(message: Trial | Verdict) -> bytes:
    """A message with its length in front."""
    data = _encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def unframed(data: bytearray) -> Iterator[bytes]:
    """Remove complete messages from `data` and yield them."""
    while len(data) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
        if len(data) < end:
            return
        yield bytes(data[LENGTH_BYTES:end])
        del data[:end]


class _Fork:
    """A fork that tries one constraint, and its output so far."""

    def __init__(self, number: int, pid: int, pipe: int) -> None:
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.output = bytearray()

    def collect(self) -> bytes:
        """The framed verdict of a fork that has closed its pipe."""
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status == 0:
            return bytes(self.output)
        ended = signal.Signals(-status).name if status < 0 else f"status {status}"
        return framed(Verdict(self.number, ended=ended))


class TrialServer:
    """Tries the constraints from stdin until it closes, each within `seconds` of CPU time.

    `compile_constraint` returns the compiled constraint or raises.
    """

    def __init__(self, compile_constraint: CompileConstraint, seconds: float) -> None:
        self._compile = compile_constraint
        self._seconds = seconds
        self._output = os.dup(1)
        os.dup2(2, 1)  # other output must not mix with the verdicts
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
        """Start and cancel trials as the worker requests; False once the worker is gone."""
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


def _try(
    compile_constraint: CompileConstraint, trial: Trial, seconds: float, pipe: int
) -> NoReturn:
    """Try a constraint in the fork within bounds, write the verdict, and end all threads."""
    silence = os.open(os.devnull, os.O_WRONLY)  # constraints must not fill the log
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    most = _bytes("VmData") + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (ceil(seconds), ceil(seconds)))
    verdicts: list[Verdict] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(_tried(compile_constraint, trial)))
    thread.start()
    while thread.is_alive() and time.process_time() < NORMAL_PRIORITY_S:
        thread.join(NORMAL_PRIORITY_S)
    if thread.is_alive():
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task), NICENESS)
        thread.join()
    if not verdicts:
        os._exit(1)
    os.write(pipe, framed(verdicts[0]))
    os._exit(0)


def _tried(compile_constraint: CompileConstraint, trial: Trial) -> Verdict:
    assert trial.guided is not None
    before = _bytes("VmRSS")
    try:
        made = compile_constraint(trial.guided)  # alive until its size is known
    except MemoryError:
        return Verdict(trial.number, ended="MemoryError")
    except Exception as error:  # engines raise anything
        return Verdict(trial.number, str(error)[:MAX_REASON] or type(error).__name__)
    size = max(len(trial.guided.value), _bytes("VmRSS") - before)
    del made
    return Verdict(trial.number, size=size)


def _bytes(name: str) -> int:
    """A size of this process in bytes, by its name in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0
