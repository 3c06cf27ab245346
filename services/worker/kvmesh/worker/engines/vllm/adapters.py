"""LoRA adapters of vLLM, each known to it by its identity and a number that is never reused."""

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from kvmesh.worker.engine import EngineConfigError, Rejected
from kvmesh.worker.lora.folder import AdapterError, AdapterFolder

log = logging.getLogger(__name__)
POLL_S = 0.02
_PREFIX = "Call to add_lora method failed: "


class VllmAdapters:
    """The adapters that vLLM has loaded. A request may only name one of these.

    vLLM would load another one by itself, in the middle of a step, and die if it cannot. Its prefix
    cache separates adapters by name and folder, so identities as names separate their contents.
    """

    def __init__(self, configured: dict[str, AdapterFolder]) -> None:
        self._configured = configured
        self._loaded: dict[str, LoRARequest] = {}
        self._uses: Counter[str] = Counter()
        self._last_id = 0
        self._llm: Any = None
        self.max_rank = 0

    def __contains__(self, identity: str) -> bool:
        return identity in self._loaded

    @property
    def identities(self) -> list[str]:
        """The loaded adapters."""
        return list(self._loaded)

    async def open(self, llm: Any) -> None:
        """Load the configured adapters into a started vLLM; raises EngineConfigError."""
        self._llm = llm
        config = llm.vllm_config.lora_config
        self.max_rank = config.max_lora_rank if config is not None else 0
        for identity, folder in self._configured.items():
            try:
                folder.check_rank(self.max_rank)
                await self.load(identity, folder.path)
            except AdapterError as error:
                raise EngineConfigError(f"LoRA adapter {identity}: {error}") from error

    async def load(self, identity: str, folder: Path) -> None:
        """Load an adapter into all ranks, or into none; raises AdapterError."""
        request = self._loaded.get(identity)
        if request is None:
            self._last_id += 1
            request = LoRARequest(identity, self._last_id, str(folder))
        try:
            loaded = await self._llm.add_lora(request)
        except EngineDeadError as error:
            raise AdapterError("vLLM has died") from error
        except Exception as error:  # vLLM re-raises its engine's errors as plain ones
            await self._remove(request)
            raise AdapterError(f"vLLM refuses the adapter: {_cause(error)}") from error
        if not loaded:
            raise AdapterError("vLLM did not load the adapter")
        self._loaded[identity] = request

    async def unload(self, identity: str) -> None:
        """Unload an adapter after the last step of its requests; raises AdapterError."""
        request = self._loaded.get(identity)
        if request is None:
            return
        while self._uses[identity]:
            await asyncio.sleep(POLL_S)
        del self._loaded[identity]
        if not await self._remove(request):
            raise AdapterError("vLLM did not unload the adapter; see its log")

    def begin(self, identity: str | None) -> LoRARequest | None:
        """An adapter for a request; it stays loaded until `end`. Raises Rejected."""
        if identity is None:
            return None
        request = self._loaded.get(identity)
        if request is None:
            raise Rejected(f"there is no adapter {identity}")
        self._uses[identity] += 1
        return request

    def end(self, identity: str | None) -> None:
        """vLLM has ended or aborted a request that began with this adapter."""
        if identity is not None:
            self._uses[identity] -= 1
            if not self._uses[identity]:
                del self._uses[identity]

    async def _remove(self, request: LoRARequest) -> bool:
        try:
            return bool(await self._llm.remove_lora(request.lora_int_id))
        except Exception as error:  # vLLM re-raises its engine's errors as plain ones
            log.warning("vLLM cannot remove adapter %s: %s", request.lora_name, _cause(error))
            return False


def _cause(error: BaseException) -> str:
    """The last line of the message: vLLM puts the reason there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix(_PREFIX) if lines else type(error).__name__
