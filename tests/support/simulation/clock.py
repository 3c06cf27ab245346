"""Simulated clocks and random numbers for kvmesh's modules."""

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from types import ModuleType, SimpleNamespace

from kvmesh._native import Watchdog
from support.simulation.loop import NODE, SimLoop

EPOCH = 1_800_000_000.0
SIMULATED_MODULES = ("kvmesh.", "support.", "nats.js.object_store")  # modules with simulated clocks


class NullWatchdog:
    """Replaces the watchdog, which uses the machine's time and would end pytest."""

    def __init__(self, step: float, looks: int) -> None:
        pass

    def tick(self) -> None:
        pass

    def stop(self) -> None:
        pass


@contextmanager
def simulated_clocks(loop: SimLoop, skews: dict[str, float]) -> Iterator[None]:
    """While open, `time.time` of a node is off by its skew; `monotonic` is the loop's time.

    Random names depend on the seed. pytest and asyncio use the machine's clocks.
    """

    def monotonic() -> float:
        return loop.now

    def unix() -> float:
        return EPOCH + loop.now + skews.get(NODE.get(), 0.0)

    class Datetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Datetime":
            return cls.fromtimestamp(unix(), tz)

    fields = vars(time) | {"time": unix, "monotonic": monotonic, "perf_counter": monotonic}
    fake = SimpleNamespace(**fields)
    names = SimpleNamespace(
        token_hex=lambda size: f"{loop.random.getrandbits(8 * size):0{2 * size}x}"
    )
    stand_ins: list[tuple[str, object, object]] = [
        ("time", time, fake),
        ("monotonic", time.monotonic, monotonic),
        ("datetime", datetime, Datetime),
        ("secrets", secrets, names),
        ("Watchdog", Watchdog, NullWatchdog),
    ]
    replaced: list[tuple[ModuleType, str, object]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(SIMULATED_MODULES):
            continue
        for attribute, real, stand_in in stand_ins:
            if vars(module).get(attribute) is real:
                replaced.append((module, attribute, real))
                setattr(module, attribute, stand_in)
    try:
        yield
    finally:
        for module, attribute, real in replaced:
            setattr(module, attribute, real)
