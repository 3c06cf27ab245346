"""Admission of work by a worker, before the engine sees it."""

from collections.abc import Sequence

from kvmesh.bus.messages import GENERATE, Guided, Pooling, PromptImage, Work, WorkReply
from kvmesh.worker.engine import EngineInfo

ACCEPTED = WorkReply(status="accepted")
CHECKING = WorkReply(status="accepted", checking=True)
DIGEST_BYTES = 32  # of an image
MAX_CONSTRAINT_BYTES = 512 << 10  # of a schema, grammar or regular expression
STORED = WorkReply(status="accepted", stored=True)
INCOMPLETE = WorkReply(status="incomplete", reason="the base prompt is no longer stored here")
BUSY = WorkReply(status="busy", reason="too many requests wait in the engine")
DRAINING = WorkReply(status="draining", reason="this worker is leaving")
UNLOADED = WorkReply(status="unloaded", reason="its adapter has made room for another one")


def rejection_reason(work: Work, info: EngineInfo) -> str:
    """The reason why `work` can never run on this engine; empty if it can."""
    length, ragged = divmod(len(work.tokens), 4)
    if ragged:
        return f"the token buffer has {len(work.tokens)} bytes, not a multiple of 4"
    if not length:
        return "the prompt is empty"
    if (task := work.pooling.task if work.pooling is not None else GENERATE) != info.task:
        return f"this worker's model does not {task}: its task is {info.task}"
    if work.pooling is not None:
        if reason := _unpoolable(work.pooling, length, info.context):
            return reason
    elif length >= info.context:
        return f"the prompt has {length} tokens; with the output, at most {info.context} fit"
    if not 0 <= work.generated < length:
        return f"{work.generated} generated tokens in a prompt of {length}"
    if work.sampling.max_tokens <= work.generated:
        return f"max_tokens is {work.sampling.max_tokens}, with {work.generated} generated before"
    if not 0 <= work.rank < info.capacity.dp_ranks:
        return f"there is no rank {work.rank}"
    if work.adapter is not None and work.adapter not in info.adapters:
        return f"there is no adapter {work.adapter}"
    if work.images:
        if not info.image_placeholder:
            return f"the {info.name} engine of this worker takes no images"
        if not _in_order(work.images, length):
            return f"the images are not one behind the other in a prompt of {length} tokens"
    return _too_large(work.sampling.guided)


def _unpoolable(pooling: Pooling, length: int, context: int) -> str:
    """The reason why the inputs of a prompt of `length` tokens cannot be computed."""
    lengths, seconds = pooling.lengths, pooling.seconds or [0] * len(pooling.lengths)
    if sum(lengths) != length or min(lengths) < 1:
        return f"the lengths of the inputs are not those of a prompt of {length} tokens"
    if len(seconds) != len(lengths) or not all(
        0 <= s < n for s, n in zip(seconds, lengths, strict=True)
    ):
        return "the places of the documents are not within the inputs"
    if max(lengths) > context:
        return f"an input has {max(lengths)} tokens; at most {context} fit"
    return ""


def _in_order(images: Sequence[PromptImage], length: int) -> bool:
    end = 0
    for image in images:
        if image.start < end or image.length < 1 or len(image.digest) != DIGEST_BYTES:
            return False
        end = image.start + image.length
    return end <= length


def _too_large(guided: Guided | None) -> str:
    if guided is None or (size := len(guided.value.encode())) <= MAX_CONSTRAINT_BYTES:
        return ""
    return f"the {guided.kind} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are allowed"


def invalid(reason: str) -> WorkReply:
    return WorkReply(status="invalid", reason=reason)
