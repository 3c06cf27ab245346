"""Warnings about KV events of an engine that do not reach the index."""

from collections.abc import Iterable, Iterator

from kvmesh.worker.enginecore.counters import LedgerCounts

QUIET_S = 300.0  # after which a loss that does not grow is no longer a warning
FEW_BLOCKS = 16  # whose position stays unknown, as where a worker joins a running engine
MANY_WAITING = 256  # blocks that an event may still place


class EventLosses:
    """Finds the ranks of a worker that lose KV events now."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: dict[str, tuple[int, float]] = {}  # the count, and when it last grew

    def check(self, ranks: Iterable[LedgerCounts], now: float) -> dict[str, str]:
        """Return a warning for each loss that has grown within QUIET_S."""
        found = {}
        for counts in ranks:
            for reason, count, text in _losses(counts):
                about = f"{counts.rank} {reason}"
                seen, grew_at = self._seen.get(about, (0, now))
                if count > seen:
                    grew_at = now
                self._seen[about] = (count, grew_at)
                if now - grew_at < QUIET_S:
                    found[about] = f"{self._name} rank {counts.rank}: {text}"
        return found


def _losses(counts: LedgerCounts) -> Iterator[tuple[str, int, str]]:
    for reason, tiers in counts.dropped.items():
        count = sum(tiers)
        if reason == "part_of_block":
            continue  # the engine finds less than a block more
        if reason == "block_size":
            yield (
                *(reason, count),
                f"the engine's KV events have blocks of {counts.odd_size} tokens, the model's are"
                f" of {counts.block_size}: the index does not know them",
            )
        elif reason == "unknown_position" and count < FEW_BLOCKS:
            continue
        elif reason == "unknown_position":
            yield (
                *(reason, count),
                "no KV event of the engine says what precedes some of its blocks: the index does"
                " not know them (does its offloading describe blocks?)",
            )
        elif reason == "reset":
            yield (
                *(reason, count),
                "the engine has cleared its cache or restarted, and its KV events do not say what"
                " its lower tiers have kept: the index has forgotten the blocks there",
            )
        elif reason == "never_removed":
            yield (
                *(reason, count),
                "KV events of the engine report blocks stored in a lower tier, and none removed:"
                " the index keeps the newest",
            )
        else:
            yield (
                *(reason, count),
                "KV events of the engine have more or fewer tokens than their blocks: the index"
                " does not know these",
            )
    if counts.unplaced >= MANY_WAITING:
        yield (
            *("unplaced", counts.unplaced),
            "many blocks wait for a KV event of the engine that says what precedes them: the index"
            " does not know them meanwhile",
        )
    if counts.malformed:
        yield (
            *("malformed", counts.malformed),
            "messages of the engine's KV events cannot be decoded, the index lacks their blocks:"
            f" {counts.last_error}",
        )
    if counts.lost:
        yield (
            *("lost", counts.lost),
            f"{counts.lost} messages of the engine's KV events never arrived: the index lacks"
            " blocks of which they told, and may have some that are gone",
        )
