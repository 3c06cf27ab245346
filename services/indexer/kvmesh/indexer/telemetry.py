"""The indexer's figures: a read-only view of its parts for the metrics."""

from collections.abc import Mapping
from dataclasses import asdict

from kvmesh.indexer.checker import CheckCounts
from kvmesh.indexer.feed import Feed
from kvmesh.indexer.queries.query_server import QueryServer
from kvmesh.indexer.rank_state import RankStates
from kvmesh.indexer.snapshots.snapshotter import Snapshotter


class IndexerTelemetry:
    """Collects counters and levels; their keys are the names in `metrics`."""

    def __init__(
        self,
        states: RankStates,
        feed: Feed,
        queries: QueryServer,
        snapshotter: Snapshotter,
        checks: CheckCounts,
    ) -> None:
        self._states = states
        self._feed = feed
        self._queries = queries
        self._snapshotter = snapshotter
        self._checks = checks

    def read(self) -> Mapping[str, float]:
        """Every figure that `metrics` names."""
        return {**self._counters(), **self._levels()}

    def _counters(self) -> dict[str, float]:
        return {
            **asdict(self._states.counts),
            **asdict(self._feed.counts),
            **asdict(self._queries.counts),
            **asdict(self._snapshotter.counts),
            **asdict(self._checks),
        }

    def _levels(self) -> dict[str, float]:
        stats = self._states.index.stats()
        return {
            "blocks": stats.blocks,
            "entries": stats.entries,
            "memory_bytes": stats.bytes,
            "ranks": self._states.ranks,
            "unknown_ranks": self._states.unknown,
            "pending": self._feed.pending,
            "lag_seconds": self._feed.lag,
            "applied_seq": self._feed.applied,
            "snapshot_seq": self._snapshotter.covered,
            "snapshot_bytes": self._snapshotter.size,
            "ready": float(self._queries.is_open),
        }
