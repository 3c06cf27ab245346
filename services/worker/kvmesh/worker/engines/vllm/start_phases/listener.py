"""Receives the phases that vLLM's processes tell, while vLLM starts."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from kvmesh.bus.messages import StartPhase
from kvmesh.worker.engines.vllm.start_phases.sender import SOCKET_VARIABLE, PhaseReport
from kvmesh.worker.start.timeline import StartTimeline

log = logging.getLogger(__name__)
MOST_BYTES = 4096
UNHEARD = "a process that has told nothing"
EXPECTED = (StartPhase.IMPORTS, StartPhase.WEIGHTS, StartPhase.WARM_UP)
_decoder = msgspec.msgpack.Decoder(PhaseReport)


class ToldError(Exception):
    """The first error that a process has told, which others follow from."""


@asynccontextmanager
async def start_phases_told(folder: Path, timeline: StartTimeline) -> AsyncIterator[None]:
    """Within the block, processes that start here tell `timeline` their phases.

    They find the socket, which is in the private `folder`, by a variable of the environment. If the
    block raises an error, after a process has told why its start fails, raises ToldError: vLLM says
    no more than that some process has failed.
    """
    listener = _Listener(timeline)
    path = folder / "start"
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        try:
            channel.bind(str(path))
        except OSError as error:
            log.warning("vLLM's processes cannot tell the phases of their start: %s", error)
            yield
            return
        loop.add_reader(channel, listener.receive, channel)
        os.environ[SOCKET_VARIABLE] = str(path)
        try:
            yield
            listener.receive(channel)
            listener.log_missing()
        except Exception as error:
            listener.receive(channel)
            if listener.error:
                raise ToldError(listener.error) from error
            raise
        finally:
            os.environ.pop(SOCKET_VARIABLE, None)
            loop.remove_reader(channel)
            path.unlink(missing_ok=True)
            listener.close()


def imports_follow(timeline: StartTimeline) -> None:
    """From now until a process tells another phase, the next one is taken to import packages.

    It tells that only when it has.
    """
    timeline.enter(UNHEARD, StartPhase.IMPORTS, time.monotonic())


class _Listener:
    def __init__(self, timeline: StartTimeline) -> None:
        self._timeline = timeline
        self._told: set[str] = set()
        self._sources = {UNHEARD}
        self.error = ""

    def receive(self, channel: socket.socket) -> None:
        """Take all datagrams that have arrived."""
        with suppress(BlockingIOError):
            while True:
                self._take(channel.recv(MOST_BYTES))

    def _take(self, data: bytes) -> None:
        try:
            report = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            log.debug("ignored a malformed phase: %s", error)
            return
        if report.error:
            self.error = self.error or report.error
            return
        now, source = time.monotonic(), f"process {report.pid}"
        if report.pid == os.getpid() and report.phase == StartPhase.IMPORTS:
            return  # they were over before
        self._sources.add(source)
        self._timeline.leave(UNHEARD)
        if report.ended is None:
            self._timeline.enter(source, report.phase, min(report.began, now))
        else:
            self._timeline.leave(source)
            ended = min(report.ended, now)
            if self._timeline.add(report.phase, report.began, ended, report.outer):
                self._told.add(report.phase)
                if report.phase == StartPhase.IMPORTS:
                    imports_follow(self._timeline)

    def log_missing(self) -> None:
        """Log the phases of every start that no process has told."""
        if missing := [phase for phase in EXPECTED if phase not in self._told]:
            log.info("vLLM told no times of: %s (by its log, at level INFO)", ", ".join(missing))

    def close(self) -> None:
        for source in self._sources:
            self._timeline.leave(source)
