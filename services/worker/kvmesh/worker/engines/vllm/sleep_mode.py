"""vLLM's sleep mode: its weights move to the memory of the host, or go, and so does the KV."""

import asyncio
import logging
from typing import Any

from kvmesh.worker.engine import EngineConfigError, EngineError

log = logging.getLogger(__name__)
SLEEP_ARGUMENT = "enable_sleep_mode"
KEEP, DROP = 1, 2  # vLLM's levels
WEIGHTS, KV = "weights", "kv_cache"  # what vLLM wakes apart


class SleepMode:
    """Sleep and wake of one vLLM, by its own calls; `level` says what becomes of the weights.

    `problem` is the reason if this vLLM cannot sleep, else empty.
    """

    def __init__(self, level: int, problem: str) -> None:
        self._level = level
        self.problem = problem

    async def sleep(self, llm: Any) -> None:
        """Free the devices of a vLLM without requests; raises EngineError."""
        try:
            await llm.sleep(level=self._level, mode="abort")
            asleep = await llm.is_sleeping()
        except Exception as error:  # vLLM re-raises its engine's errors as plain ones
            raise EngineError(f"vLLM does not fall asleep: {error}") from error
        if not asleep:
            raise EngineError("vLLM has not fallen asleep")

    async def wake(self, llm: Any) -> None:
        """Take the devices again, with the weights and empty KV; raises EngineError."""
        try:
            if self._level == DROP:
                await llm.wake_up(tags=[WEIGHTS])
                await llm.collective_rpc("reload_weights")
                await llm.wake_up(tags=[KV])
            else:
                await llm.wake_up()
            asleep = await llm.is_sleeping()
        except Exception as error:  # vLLM re-raises its engine's errors as plain ones
            raise EngineError(f"vLLM does not wake: {error}") from error
        if asleep:
            raise EngineError("vLLM has not woken")


def sleep_mode(
    arguments: dict[str, Any], level: int, available: bool, holds_memory: bool
) -> SleepMode:
    """The sleep mode of a vLLM with these engine arguments, on a platform with it or without.

    `holds_memory`: a KV connector keeps addresses of the device's memory. Raises EngineConfigError
    if the arguments ask for a sleep mode that the platform lacks.
    """
    if not arguments.get(SLEEP_ARGUMENT):
        return SleepMode(level, f"vLLM runs without {SLEEP_ARGUMENT}: set it in vllm.args")
    if not available:
        raise EngineConfigError(
            f"vLLM has no sleep mode on this platform: remove {SLEEP_ARGUMENT} from vllm.args"
        )
    problem = ""
    if holds_memory:
        problem = "a KV connector of vLLM has registered memory that sleep would take away"
    elif level == DROP and arguments.get("enable_lora"):
        problem = f"vllm.sleep_level {DROP} would lose the adapters in vLLM: {KEEP} keeps them"
    return SleepMode(level, problem)


async def died(llm: Any, interval_s: float) -> EngineError:
    """Return once a vLLM that sleeps has died."""
    while not llm.errored:
        await asyncio.sleep(interval_s)
    return EngineError("vLLM has died; see its log")
