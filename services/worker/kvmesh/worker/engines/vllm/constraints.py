"""The constraints that vLLM is given: those that another process has compiled first."""

import sys
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from kvmesh.bus.messages import Guided
from kvmesh.worker.constraints.trial_client import TrialClient

MAX_ACCEPTED = 4096
_encode = msgspec.msgpack.Encoder().encode


class Constraints:
    """Tries each constraint once, under this `VllmConfig`, for `most_s` seconds at most.

    `folder` is private to this worker.
    """

    def __init__(self, config: Any, folder: Path, most_s: float) -> None:
        file = folder / "vllm.config"
        file.write_bytes(cloudpickle.dumps(config))
        command = (sys.executable, "-m", "kvmesh.worker.engines.vllm.trial", str(file), str(most_s))
        self._trials = TrialClient(most_s, *command)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def open(self) -> None:
        """Have the process ready; raises EngineError."""
        await self._trials.open()

    def __contains__(self, guided: Guided) -> bool:
        return guided.kind == "json_object" or _digest(guided) in self._known

    async def compile(self, guided: Guided) -> None:
        """Raises Rejected for a constraint that vLLM cannot follow, or should not."""
        await self._trials.try_constraint(guided)
        self._known[_digest(guided)] = None
        if len(self._known) > MAX_ACCEPTED:
            self._known.popitem(last=False)

    def close(self) -> None:
        self._trials.close()


def _digest(guided: Guided) -> bytes:
    return blake2b(_encode(guided), digest_size=16).digest()
