"""Questions of operators to routers and indexers about what these measure."""

from typing import Literal

from msgspec import Struct


class ShowSpeeds(Struct, frozen=True, tag="show_speeds"):
    """Ask a router for the measured speed of every rank."""


class RankSpeed(Struct, frozen=True, kw_only=True):
    """Speed of one rank: its work in a given time over that of the median rank of its model.

    If it is an outlier, by which routing scales its cost, it has been one `since` that Unix time.
    """

    model: str
    instance: str
    rank: int
    speed: float
    since: float | None = None


class SpeedReport(Struct, frozen=True):
    """The measured ranks; one that has been idle lately, or alone in its model, is missing."""

    ranks: list[RankSpeed]


class CheckIndex(Struct, frozen=True, kw_only=True, tag="check_index"):
    """Ask an indexer to compare its blocks of one rank with those of the rank's worker, now."""

    instance: str
    rank: int


class IndexCheck(Struct, frozen=True, kw_only=True):
    """Result of a comparison, at one event id of the rank.

    `result` is "equal", "differs", "unknown" (the rank waits for a dump, or the index does not
    have it), "moved" (its events were too fast to compare at one of them) or "failed" for `reason`.
    `held` are blocks of the worker and `indexed` of the index. `missing` of the worker's are not in
    the index, and `extra` only there; both are None if the worker has too many to list.
    """

    result: Literal["equal", "differs", "unknown", "moved", "failed"]
    reason: str = ""
    held: int = 0
    indexed: int = 0
    missing: int | None = None
    extra: int | None = None
