"""The process that compares beside the dashboard: captured messages in, figures out."""

import time

import msgspec
from msgspec import Struct

from kvmesh.bus.messages import MessageDecoder
from kvmesh.router.errors import RouterConfigError
from kvmesh.runtime.piped_process import Send, serve_frames
from kvmesh.simulator.options import SimulationError
from kvmesh.simulator.whatif.comparison import (
    Alternative,
    LiveConfiguration,
    WhatIfAnswer,
    compare,
)
from kvmesh.step_times.profile import StepProfileError
from kvmesh.workload.capture import Recorder
from kvmesh.workload.errors import WorkloadError

MODULE = "kvmesh.simulator.whatif.process"
PROGRESS_S = 0.2


class ComparisonTask(Struct, frozen=True, kw_only=True):
    """Messages of the route stream, and the two configurations."""

    messages: list[bytes]
    live: LiveConfiguration
    other: Alternative


class ComparisonProgress(Struct, frozen=True, kw_only=True, tag="progress"):
    """The number of requests that have ended in the run `name`."""

    name: str
    done: int
    total: int


class ComparisonFailure(Struct, frozen=True, kw_only=True, tag="failure"):
    """A task that cannot be simulated, and the reason."""

    reason: str


Reply = ComparisonProgress | WhatIfAnswer | ComparisonFailure
_tasks = MessageDecoder(ComparisonTask)


def compare_task(data: bytes, send: Send) -> None:
    """Send progress, then the comparison or the reason why there is none."""
    task = _tasks.decode(data)
    sent_at = float("-inf")

    def progress(name: str, done: int, total: int) -> None:
        nonlocal sent_at
        if (now := time.monotonic()) - sent_at >= PROGRESS_S:
            sent_at = now
            reply(ComparisonProgress(name=name, done=done, total=total))

    def reply(message: Reply) -> None:
        send(msgspec.msgpack.encode(message))

    try:
        recorder = Recorder()
        for message in task.messages:
            recorder.read(message)
        recorder.check()
        reply(compare(recorder.rounds, task.live, task.other, progress))
    except (WorkloadError, SimulationError, RouterConfigError, StepProfileError, OSError) as error:
        reply(ComparisonFailure(reason=str(error)))
    except Exception as error:
        reply(ComparisonFailure(reason=f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve_frames(compare_task)
