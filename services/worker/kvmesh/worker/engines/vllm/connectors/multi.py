"""vLLM's `MultiConnector` that reports the tiers of the tokens which its connectors load.

vLLM counts the tokens of a step by their source; it does not tell which requests they belong to.
"""

from typing import Any, Protocol, runtime_checkable

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvmesh.index import TIERS
from kvmesh.worker.adapters.cached_sources import LOADED_TOKENS, source_tier
from kvmesh.worker.adapters.connector_series import LOADED
from kvmesh.worker.adapters.engine_stores import STORAGE, is_remote
from kvmesh.worker.adapters.request_origin import OriginError, request_origin
from kvmesh.worker.engines.vllm.kvbm.settings import CONNECTOR as KVBM_CONNECTOR
from kvmesh.worker.engines.vllm.prometheus import UnexportedStats
from kvmesh.worker.engines.vllm.transfer_config import PACKAGE

REMOTE = TIERS - 2  # of tokens by tier from tier 1 on


@runtime_checkable
class NotesLoaded(Protocol):
    """A connector that is told of the tokens which others load, by tier from tier 1 on."""

    def note_loaded(self, request: str, tokens: list[int]) -> None: ...


class LoadedTokens(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """For each request, the tokens that were loaded from each tier, from tier 1 on."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data.update(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Figures for vLLM's own log."""
        return {"requests": len(self.data)}

    def is_empty(self) -> bool:
        return not self.data


class MultiConnector(multi_connector.MultiConnector):  # type: ignore[misc]  # as above
    """Has vLLM's name, by which vLLM knows that there are several connectors."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._served: dict[str, list[int]] = {}

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found: dict[CacheHitSource, int] = super().get_external_cache_hit_sources(
            request, num_external_tokens
        )
        chosen = self._requests_to_connector.get(request.request_id)
        if chosen is not None and _counts(self._connectors[chosen]):
            try:
                origin = request_origin(request)
            except OriginError:
                origin = None  # the connector for retention warns
            if origin is not None:
                tokens = [0] * (TIERS - 1)
                stores_remotely = _stores_remotely(self._connectors[chosen])
                for source, count in found.items():
                    remote = stores_remotely and source is CacheHitSource.DISK
                    tokens[REMOTE if remote else source_tier(source.value) - 1] += count
                self._served[origin.request] = tokens
                self._note_loaded(origin.request, tokens)
        return found

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        own = stats.data.get(KVBM_CONNECTOR) if stats is not None else None
        if own is not None:
            size = self._vllm_config.cache_config.block_size
            for request, blocks in own.data.get(LOADED, {}).items():
                self._note_loaded(request, [size * count for count in blocks])
        if self._served:
            stats = stats or multi_connector.MultiKVConnectorStats()
            stats[LOADED_TOKENS] = LoadedTokens(self._served)
            self._served = {}
        return stats

    def _note_loaded(self, request: str, tokens: list[int]) -> None:
        for connector in self._connectors:
            if isinstance(connector, NotesLoaded):
                connector.note_loaded(request, tokens)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Without the served tokens: vLLM looks for a connector of each name."""
        others = {name: stats for name, stats in (data or {}).items() if name != LOADED_TOKENS}
        return super().build_kv_connector_stats(others if data is not None else None)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> multi_connector.MultiKVConnectorPromMetrics:
        metrics = super().build_prom_metrics(*arguments)
        metrics._prom_metrics[LOADED_TOKENS] = UnexportedStats(*arguments)
        return metrics


def _stores_remotely(connector: Any) -> bool:
    """True if all files and objects of an offloading connector are remote.

    vLLM's events say so of each tier, and its source of a hit does not.
    """
    transfer = getattr(connector, "_kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    tiers = [tier for tier in extra.get("secondary_tiers") or () if tier.get("type") in STORAGE]
    return bool(tiers) and all(map(is_remote, tiers))


def _counts(connector: Any) -> bool:
    """True for a cache: kvmesh's connectors report by themselves, and a handoff is no cache hit."""
    from_peer = getattr(type(connector), "_cache_hit_source", None) is CacheHitSource.P2P
    return not (from_peer or type(connector).__module__.startswith(f"{PACKAGE}."))
