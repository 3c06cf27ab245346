"""Constraints for vLLM, each compiled in another process before vLLM receives it."""

import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from kvmesh.bus.messages import Guided
from kvmesh.runtime.lru import LruCache
from kvmesh.worker.constraints.trial_client import TrialClient

MAX_ACCEPTED = 4096
_encode = msgspec.msgpack.Encoder().encode


class Constraints:
    """Tries each constraint once under a `VllmConfig`, for up to `timeout_s` seconds.

    `folder` is private to this worker; the trial process reads the config from it.
    """

    def __init__(self, config: Any, folder: Path, timeout_s: float) -> None:
        file = folder / "vllm.config"
        file.write_bytes(cloudpickle.dumps(config))
        command = (
            sys.executable,
            "-m",
            "kvmesh.worker.engines.vllm.trial",
            str(file),
            str(timeout_s),
        )
        self._trials = TrialClient(timeout_s, *command)
        self._accepted: LruCache[bytes, bool] = LruCache(MAX_ACCEPTED)

    async def open(self) -> None:
        """Start the trial process; raises EngineError."""
        await self._trials.open()

    def __contains__(self, guided: Guided) -> bool:
        return guided.kind == "json_object" or _digest(guided) in self._accepted

    async def compile(self, guided: Guided) -> None:
        """Try a constraint; raises Rejected if vLLM cannot compile it within the bounds."""
        await self._trials.try_constraint(guided)
        self._accepted.put(_digest(guided), True)

    def close(self) -> None:
        self._trials.close()


def _digest(guided: Guided) -> bytes:
    return blake2b(_encode(guided), digest_size=16).digest()
