"""Recognises the log records in which vLLM states how long parts of its start took.

A record that another version words differently is not recognised: its phase is then part of the
one around it. vLLM replaces the handlers of its loggers while it starts, but keeps the factory of
records.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

from kvmesh.bus.messages import StartPhase
from kvmesh.worker.engines.vllm.start_phases.sender import enter, fail, listening, record

log = logging.getLogger(__name__)
LOGGER = "vllm"
FAILED = "failed to start"  # in a process whose error follows


class PhasesOfRecords:
    """The phases of one process by its log records, in order; `created` is in Unix seconds."""

    def __init__(self) -> None:
        self._loaded: float | None = None
        self._warming: float | None = None  # on CPUs, where this compiles, untimed
        self._has_code = False
        self._sized: float | None = None

    def take(self, message: str, created: float) -> None:
        """Tell the phases that this record begins or ends."""
        for pattern, handle in _PATTERNS:
            if found := pattern.search(message):
                seconds = float(found.group(1)) if pattern.groups else 0.0
                handle(self, created, seconds)
                return

    def weights_begin(self, created: float, _: float) -> None:
        enter(StartPhase.WEIGHTS)

    def weights_end(self, created: float, seconds: float) -> None:
        record(StartPhase.WEIGHTS, created - seconds, created)
        self._loaded = created
        enter(StartPhase.POST_PROCESSING)

    def load_ends(self, created: float, _: float = 0.0) -> None:
        """The model is loaded, or something else begins."""
        if self._loaded is not None:
            record(StartPhase.POST_PROCESSING, self._loaded, created)
            self._loaded = None

    def warm_up_begins(self, created: float, _: float) -> None:
        self.load_ends(created)
        self._warming, self._has_code = created, False
        enter(StartPhase.COMPILE)

    def cache_used(self, created: float, seconds: float = 0.0) -> None:
        """The compiled code was stored or loaded, `seconds` ago."""
        if self._warming is not None:
            record(StartPhase.COMPILE, self._warming, created - seconds)
            self._warming, self._has_code = created, True
            enter(StartPhase.WARM_UP)

    def profiled(self, created: float, seconds: float) -> None:
        self.cache_used(created, seconds)
        self.warmed_up(created, seconds)

    def warm_up_ends(self, created: float, _: float) -> None:
        if self._warming is not None:
            phase = StartPhase.WARM_UP if self._has_code else StartPhase.COMPILE
            record(phase, self._warming, created)
            self._warming = None

    def compile_begins(self, created: float, _: float) -> None:
        self.load_ends(created)
        enter(StartPhase.COMPILE)

    def compile_ends(self, created: float, seconds: float) -> None:
        record(StartPhase.COMPILE, created - seconds, created)
        enter(StartPhase.WARM_UP)

    def warmed_up(self, created: float, seconds: float) -> None:
        self.load_ends(created - seconds)
        record(StartPhase.WARM_UP, created - seconds, created)

    def kv_sized(self, created: float, _: float) -> None:
        self._sized = created
        enter(StartPhase.KV_ALLOCATION)

    def core_ready(self, created: float, seconds: float) -> None:
        """Profiling, allocation and warm-up are over: what no worker tells is warm-up."""
        if self._sized is not None:
            record(StartPhase.KV_ALLOCATION, self._sized, created, outer=True)
            self._sized = None
        record(StartPhase.WARM_UP, created - seconds, created, outer=True)


_S = r"([0-9]+(?:\.[0-9]+)?)"
_PATTERNS: list[tuple[re.Pattern[str], Callable[[PhasesOfRecords, float, float], None]]] = [
    (
        re.compile(r"^(?:Starting to load model|Loading model from scratch)"),
        PhasesOfRecords.weights_begin,
    ),
    (re.compile(rf"^Loading weights took {_S} seconds"), PhasesOfRecords.weights_end),
    (re.compile(rf"^Model loading took .* and {_S} seconds"), PhasesOfRecords.load_ends),
    (re.compile(r"^Warming up model for the compilation"), PhasesOfRecords.warm_up_begins),
    (re.compile(r"^Warming up done"), PhasesOfRecords.warm_up_ends),
    (re.compile(r"Starting torch\.compile"), PhasesOfRecords.compile_begins),
    (re.compile(rf"torch\.compile .*took {_S} s in total"), PhasesOfRecords.compile_ends),
    (
        re.compile(r"(?:saved AOT compiled function to|Directly load AOT compilation from) "),
        PhasesOfRecords.cache_used,
    ),
    (re.compile(rf"nitial profiling/warmup run took {_S} s"), PhasesOfRecords.profiled),
    (re.compile(rf"raph capturing finished in {_S} secs"), PhasesOfRecords.warmed_up),
    (re.compile(r"KV cache size: .* tokens"), PhasesOfRecords.kv_sized),
    (re.compile(rf"^init engine .* took {_S} s"), PhasesOfRecords.core_ready),
]


class _ObservingFactory:
    """Passes vLLM's records on to `PhasesOfRecords`."""

    def __init__(self, factory: Callable[..., logging.LogRecord]) -> None:
        self._factory = factory
        self._phases = PhasesOfRecords()
        self._failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._factory(*args, **kwargs)
        if record.name.partition(".")[0] == LOGGER and listening():
            try:
                message = record.getMessage()
                self._phases.take(message, record.created)
                if record.exc_info and record.exc_info[1] and FAILED in message:
                    fail(record.exc_info[1])
            except Exception as error:  # the log of vLLM must go on
                if not self._failed:
                    self._failed = True
                    log.warning("cannot tell the phases of vLLM's start: %r", error)
        return record


_installed = False


def observe_records() -> None:
    """Tell the phases that this process's log records name, from now on."""
    global _installed
    if not _installed:
        _installed = True
        logging.setLogRecordFactory(_ObservingFactory(logging.getLogRecordFactory()))
