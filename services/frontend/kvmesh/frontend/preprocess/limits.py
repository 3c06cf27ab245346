"""Limits of the prompts and the output of a request."""

from collections.abc import Collection

from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ContextExceeded, InvalidRequest
from kvmesh.hashing import FIRST_IMAGE_TOKEN

MAX_PROMPT_BYTES = 64 << 20  # packed tokens of a request, one prompt per choice
MAX_OUTPUT_BYTES = 256 << 20  # memory for the output of a request, all choices together
OUTPUT_TOKEN_BYTES = 64
LOGPROB_BYTES = 400
COUNTED_CONTEXTS = 4
MIN_COUNTED = 1 << 18


def counted_tokens(context: int) -> int:
    """The tokens up to which a prompt beyond the context is counted, so that clients can cut it."""
    return max(COUNTED_CONTEXTS * context, MIN_COUNTED)


def check_tokens(ids: Collection[int], vocabulary: int, field: str) -> None:
    """Raises InvalidRequest for ids beyond the vocabulary, in a `field` of the body.

    Ids that name the content of images are beyond any, whatever the model's files state.
    """
    if ids and not 0 <= min(ids) <= max(ids) < min(vocabulary, FIRST_IMAGE_TOKEN):
        beyond = max(ids) if min(ids) >= 0 else min(ids)
        reason = f"`{field}`: token {beyond} is not in the model's vocabulary."
        raise InvalidRequest(reason, field)


def check_context(tokens: int, context: int) -> None:
    """Raises ContextExceeded for a prompt of more tokens than the context has."""
    if tokens > context:
        raise ContextExceeded(tokens, None, context)


def check_prompt_memory(packed: list[bytes], n: int) -> None:
    """Bound the prompts of a request: each choice is dispatched with the whole prompt."""
    if n * sum(map(len, packed)) > MAX_PROMPT_BYTES:
        limit = MAX_PROMPT_BYTES // 4
        raise InvalidRequest(
            f"The prompts of all choices together have more than {limit} tokens.", "n"
        )


def output_limit(request: GenerateRequest, prompts: int, longest: int, context: int) -> int:
    """Output tokens allowed per choice: `max_tokens`, or as many as fit if it is 0.

    The frontend holds all choices until the last one ends, so their memory is bounded as well.
    Raises ContextExceeded or InvalidRequest.
    """
    wanted = request.sampling.max_tokens
    if longest >= context:
        raise ContextExceeded(longest, None, context)
    if longest + wanted > context:
        raise ContextExceeded(longest, wanted, context)
    logprobs = request.sampling.logprobs
    size = OUTPUT_TOKEN_BYTES + (0 if logprobs is None else LOGPROB_BYTES * (1 + logprobs))
    limit = MAX_OUTPUT_BYTES // (size * prompts * request.n)
    if wanted > limit:
        reason = f"with these options {prompts * request.n} choices may have {limit} tokens each"
        raise InvalidRequest(f"`max_tokens`: {reason}, not {wanted}.", "max_tokens")
    limit = min(wanted or context - longest, limit)
    if request.sampling.min_tokens > limit:
        reason = f"`min_tokens`: at most {limit} tokens fit behind the prompt."
        raise InvalidRequest(reason, "min_tokens")
    return limit
