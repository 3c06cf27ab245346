"""Tiers of the sources by which vLLM counts cached prompt tokens."""

from collections.abc import Mapping

from kvmesh.index import TIERS

LOADED_TOKENS = "KvmeshLoadedTokens"  # key among the statistics of several connectors
SERIES = "vllm:prompt_tokens_cached_by_source_total"
DEVICE = "device"
_TIERS = {DEVICE: 0, "host": 1, "disk": 2}


def source_tier(source: str) -> int:
    """The tier of a source; what vLLM cannot tell, or finds elsewhere, is tier 3."""
    return _TIERS.get(source, TIERS - 1)


def tokens_by_tier(by_source: Mapping[str, float]) -> list[int]:
    """Cached tokens by tier, of cached tokens by source."""
    tokens = [0] * TIERS
    for source, count in by_source.items():
        tokens[source_tier(source)] += int(count)
    return tokens
