"""Ends of retained prefixes, where vLLM keeps what its layers need to continue a prompt.

A prompt can continue from a prefix only if vLLM has kept the state of linear attention, or the
blocks of a sliding window, at its end. By default vLLM keeps them near the end of each prompt and,
once a prompt has differed from an earlier one, where it did. So a second prompt with a retained
system prompt would compute it again. The connector names the end of the retained prefix in the
field of the request in which vLLM records where prompts differ.
"""

from array import array
from collections.abc import Sequence
from math import lcm
from typing import Any

from kvmesh.bus.messages import Retain
from kvmesh.hashing import block_hashes
from kvmesh.retention.token_ranges import retained_end
from kvmesh.worker.adapters.request_origin import OriginError, RequestOrigin, request_origin
from kvmesh.worker.engines.vllm.retention.hinted_requests import HintedRequests
from kvmesh.worker.engines.vllm.retention.prefix_cache import PrefixCacheRetention

SPARSE = {"SlidingWindowSpec", "MambaSpec"}


class RetainedPrefixes:
    """The retained prefixes of waiting requests; vLLM asks for them once a step.

    vLLM computes the last `dropped` blocks of a prefix again, for its draft model.
    """

    def __init__(
        self, retention: PrefixCacheRetention, hinted: HintedRequests, dropped: int
    ) -> None:
        self._retention = retention
        self._hinted = hinted
        self._dropped = dropped
        self._block_size = lcm(*retention.group_sizes)
        self._ends: dict[str, int] = {}

    def end(self, request: Any, now: float) -> int:
        """Reusable tokens of the longest retained prefix that ends before the prompt; 0 if none."""
        known = self._ends.get(request.request_id)
        if known is None:
            known = self._ends[request.request_id] = self._find(request, now)
        return known

    def forget(self, request: str) -> None:
        """Forget a request that does not wait any more."""
        self._ends.pop(request, None)

    def _find(self, request: Any, now: float) -> int:
        try:
            origin = request_origin(request) or self._hinted.origin(request)
        except OriginError:
            return 0  # the connector logs it when it allocates blocks
        if origin is None or request.mm_features:
            return 0
        longest = request.num_prompt_tokens - 1
        retention: list[Retain] = origin.retention
        ends = [retained_end(retention, longest, self._retention.defaults)]
        if self._retention.has_pins:
            ends.append(self._pinned_end(request, origin, now))
        fitting = max(end for end in ends if end <= longest)
        return max(0, fitting // self._block_size - self._dropped) * self._block_size

    def _pinned_end(self, request: Any, origin: RequestOrigin, now: float) -> int:
        tokens = array("I", request.prompt_token_ids)
        packed = block_hashes(tokens.tobytes(), self._retention.hash_size, origin.salt)[1]
        return self._retention.pinned_end(array("Q", packed), now)


def retained_prefixes(
    config: Any, specs: Sequence[Any], retention: PrefixCacheRetention, hinted: HintedRequests
) -> RetainedPrefixes | None:
    """For vLLM with this configuration and KV cache groups; None if it keeps all that is needed."""
    if not any(type(spec).__name__ in SPARSE for spec in specs):
        return None
    speculative = config.speculative_config
    dropped = speculative is not None and speculative.use_eagle_block_drop()
    return RetainedPrefixes(retention, hinted, int(dropped))
