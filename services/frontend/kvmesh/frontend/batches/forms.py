"""Batches, files and results in the forms of the two vendors' APIs. Pure."""

from datetime import UTC, datetime
from typing import Any

from msgspec import Raw, Struct

from kvmesh.frontend.apis.base import Usage, json_encode
from kvmesh.frontend.batches.batch import BatchCounts, Outcome, StoredBatch

OK = 200
REASONS = {
    "cancelled": "This request was not executed before the batch was cancelled.",
    "expired": "This request could not be executed before the completion window expired.",
}


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file of a tenant. Times are Unix seconds."""

    id: str
    tenant: str
    name: str
    purpose: str
    bytes: int
    created: float
    expires: float


class LineResult(Struct, frozen=True):
    """The answer to one request: an HTTP status, and the body. `usage` if it was generated."""

    status: int
    body: bytes
    request_id: str
    usage: Usage | None = None

    @property
    def outcome(self) -> Outcome:
        return "succeeded" if self.status == OK else "errored"


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def openai_batch(batch: StoredBatch) -> dict[str, Any]:
    counts, ended = batch.counts, batch.ended_at
    faults = [
        {"code": f.code, "line": f.line, "message": f.message, "param": f.param}
        for f in batch.faults
    ]
    at = {name: ended if batch.status == name else None for name in ("completed", "failed")}
    at |= {name: ended if batch.status == name else None for name in ("expired", "cancelled")}
    at |= {"in_progress": batch.in_progress_at, "cancelling": batch.cancelling_at}
    at |= {"created": batch.created, "expires": batch.expires, "finalizing": batch.finalizing_at}
    times = {f"{name}_at": None if time is None else int(time) for name, time in at.items()}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.models[0] if len(batch.models) == 1 else None,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        **times,
        "request_counts": {
            "total": counts.total,
            "completed": counts.succeeded,
            "failed": counts.errored + counts.expired + counts.cancelled,
        },
        "usage": _usage(counts),
        "metadata": batch.metadata,
    }


def _usage(counts: BatchCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.output,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.output,
    }


def message_batch(batch: StoredBatch, results_url: str) -> dict[str, Any]:
    """The requests count as processing until all have ended, as published."""
    counts = batch.counts
    tallies = {
        "succeeded": counts.succeeded,
        "errored": counts.errored,
        "canceled": counts.cancelled,
        "expired": counts.expired,
    }
    if not batch.ended:
        tallies = dict.fromkeys(tallies, 0)
    status = "canceling" if batch.cancelling_at is not None else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if batch.ended else status,
        "request_counts": {"processing": counts.total - sum(tallies.values()), **tallies},
        "ended_at": _rfc3339(batch.ended_at),
        "created_at": _rfc3339(batch.created),
        "expires_at": _rfc3339(batch.expires),
        "archived_at": None,
        "cancel_initiated_at": _rfc3339(batch.cancelling_at),
        "results_url": results_url if batch.ended else None,
    }


def _rfc3339(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat()


def result_line(batch: StoredBatch, number: int, custom_id: str, result: LineResult) -> bytes:
    """The line of a request that was executed, without its end."""
    if batch.form == "anthropic":
        answer: dict[str, Any] = {"type": "succeeded", "message": Raw(result.body)}
        if result.outcome == "errored":
            answer = {"type": "errored", "error": Raw(result.body)}
        return json_encode({"custom_id": custom_id, "result": answer})
    response = {
        "status_code": result.status,
        "request_id": result.request_id,
        "body": Raw(result.body),
    }
    return json_encode({**_named(batch, number, custom_id), "response": response, "error": None})


def rest_line(batch: StoredBatch, number: int, custom_id: str, outcome: Outcome) -> bytes:
    """The line of a request that was not executed, or not to its end."""
    if batch.form == "anthropic":
        kind = "canceled" if outcome == "cancelled" else outcome
        return json_encode({"custom_id": custom_id, "result": {"type": kind}})
    error = {"code": f"batch_{outcome}", "message": REASONS[outcome]}
    return json_encode({**_named(batch, number, custom_id), "response": None, "error": error})


def _named(batch: StoredBatch, number: int, custom_id: str) -> dict[str, Any]:
    return {"id": f"batch_req_{batch.id.rpartition('_')[2]}_{number}", "custom_id": custom_id}
