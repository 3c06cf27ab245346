"""A stored batch, from its creation to its end. Pure: the time is a parameter."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.frontend.apis.base import Usage

WINDOW_S = 24 * 3600.0  # after which what has not been executed expires

Form = Literal["openai", "anthropic"]
Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
Outcome = Literal["succeeded", "errored", "cancelled", "expired"]
ENDED: frozenset[Status] = frozenset(("completed", "failed", "expired", "cancelled"))


class LineFault(Struct, frozen=True, omit_defaults=True):
    """A fault of the file with the requests; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchCounts(Struct, frozen=True, omit_defaults=True):
    """Requests by outcome, and the tokens of those that succeeded."""

    total: int = 0
    succeeded: int = 0
    errored: int = 0
    cancelled: int = 0
    expired: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def plus(self, outcome: Outcome, usage: Usage | None) -> "BatchCounts":
        """With one more request."""
        added: dict[str, int] = {outcome: getattr(self, outcome) + 1}
        if usage is not None:
            for name in ("prompt", "cached", "output", "reasoning"):
                added[name] = getattr(self, name) + getattr(usage, name)
        return replace(self, **added)


class StoredBatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of a tenant. Times are Unix seconds.

    `owner` is the instance of the frontend that executes it, `key` the hash of the API key that
    counts its requests, `headers` those of its creation that say whose it is. `models` were served
    when it began: a request for another one fails for good. `output_ttl_s` bounds the age of its
    results.
    """

    id: str
    form: Form
    endpoint: str
    tenant: str
    key: str
    headers: dict[str, str]
    input_file: str
    created: float
    owner: str
    output_ttl_s: float
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    counts: BatchCounts = BatchCounts()
    models: list[str] = []
    faults: list[LineFault] = []
    in_progress_at: float | None = None
    cancelling_at: float | None = None
    finalizing_at: float | None = None
    ended_at: float | None = None
    output_file: str | None = None
    error_file: str | None = None

    @property
    def expires(self) -> float:
        return self.created + WINDOW_S

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def began(batch: StoredBatch, total: int, models: list[str], now: float) -> StoredBatch:
    """The batch whose requests are valid; one that goes on keeps what it has."""
    status: Status = "cancelling" if batch.cancelling_at is not None else "in_progress"
    first = batch.in_progress_at is None
    return replace(
        batch,
        status=status,
        in_progress_at=now if first else batch.in_progress_at,
        models=models if first else batch.models,
        counts=BatchCounts(total=total),
    )


def rejected(batch: StoredBatch, faults: list[LineFault], now: float) -> StoredBatch:
    """The batch whose requests are not valid: none of them is executed."""
    return replace(batch, status="failed", faults=faults, ended_at=now)


def cancelled(batch: StoredBatch, now: float) -> StoredBatch:
    """The batch that is to stop; unchanged if that is so already, or if it has ended."""
    if batch.ended or batch.cancelling_at is not None:
        return batch
    return replace(batch, status="cancelling", cancelling_at=now)


def merged(batch: StoredBatch, stored: StoredBatch) -> StoredBatch:
    """The batch, which may have ended, with the wish to cancel it that somebody has stored."""
    if stored.cancelling_at is None or batch.cancelling_at is not None:
        return batch
    status: Status = "cancelled" if batch.ended else "cancelling"
    if batch.status == "failed":
        status = "failed"
    return replace(batch, status=status, cancelling_at=stored.cancelling_at)


def rest(batch: StoredBatch, now: float) -> Outcome | None:
    """The outcome of requests that have not ended; None while they may go on."""
    if batch.cancelling_at is not None:
        return "cancelled"
    return "expired" if now >= batch.expires else None


def finalizing(batch: StoredBatch, now: float) -> StoredBatch:
    """The batch whose requests have all ended, and whose results are being written."""
    status: Status = "cancelling" if batch.cancelling_at is not None else "finalizing"
    return replace(batch, status=status, finalizing_at=batch.finalizing_at or now)


def ended(
    batch: StoredBatch, output_file: str | None, error_file: str | None, now: float
) -> StoredBatch:
    """The batch whose results are stored."""
    status: Status = "expired" if batch.counts.expired else "completed"
    if batch.cancelling_at is not None:
        status = "cancelled"
    return replace(
        batch, status=status, ended_at=now, output_file=output_file, error_file=error_file
    )
