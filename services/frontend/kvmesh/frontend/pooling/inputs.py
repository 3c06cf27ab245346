"""Tokens of texts to embed and of pairs to score, in groups that workers compute."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from kvmesh.bus.messages import EMBED, SCORE, Pooling
from kvmesh.frontend.apis.pooling.call import ONE_STEP, PoolingCall
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.fair_threads import Steps
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.preprocess.limits import check_context
from kvmesh.frontend.preprocess.output_form import output_form
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor, PromptTokens
from kvmesh.frontend.preprocess.prompt_encoder import PromptEncoder, check_fits
from kvmesh.frontend.tokenizer.byte_level_bpe import packed
from kvmesh.hashing import TOKEN_BYTES

GROUP = 16  # inputs that one worker computes for one message
STEP = 32 << 10  # characters, after which others have their turn


class EncodedInput(NamedTuple):
    """Packed tokens of an input; of a scored one the place of the document, and the texts."""

    tokens: bytes
    second: int = 0
    pair: tuple[str, str] = ("", "")

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


async def prepare(
    call: PoolingCall, model: ServedModel, adapter: str | None, preprocessor: Preprocessor
) -> PreparedRequest:
    """The request ready for dispatch, with one prompt for each group of its inputs.

    A model that embeds scores a pair by the vectors of both texts, which are inputs of their own.
    Raises ContextExceeded or InvalidRequest.
    """
    request, card = call.request, model.card
    steps = _encode(call, model, preprocessor.encoder)
    inputs = await preprocessor.threads.run_steps(request.owner, steps, at_once=request.light)
    salt = preprocessor.salt(request, model, adapter)
    prompts = list(grouped(inputs, call.dimensions, card.task, card.context, salt))
    form = output_form(request, model)
    return PreparedRequest(request, model, adapter, prompts, ONE_STEP.max_tokens, form, None)


def _encode(
    call: PoolingCall, model: ServedModel, encoder: PromptEncoder
) -> Steps[list[EncodedInput]]:
    tokenizer, found, size = model.dialect.tokenizer, [], 0
    pairs: list[tuple[str, str]] = []
    for query, text in call.pairs:
        if call.document_tokens is not None and (size := size + len(text)) > STEP:
            size = 0
            yield
        pairs.append((query, _cut(text, call.document_tokens, tokenizer)))
    call.pairs = pairs
    if model.card.task == EMBED:
        for given in call.inputs or list(texts_of(pairs)):
            if isinstance(given, str) and (size := size + len(given)) > STEP:
                size = 0
                yield
            tokens = yield from encoder.raw_prompt(given, model, field="input")
            found.append(_checked(EncodedInput(tokens), model))
    for query, document in pairs if model.card.task == SCORE else ():
        if (size := size + len(query) + len(document)) > STEP:
            size = 0
            yield
        for text in (query, document):
            check_fits(text, model)
        encoding = tokenizer.encode_batch([(query, document)], add_special_tokens=True)[0]
        kinds = (encoding.type_ids, encoding.sequence_ids)
        second = next((places.index(1) for places in kinds if 1 in places), 0)
        pair = EncodedInput(packed(encoding.ids), second, (query, document))
        found.append(_checked(pair, model))
    return found


def _checked(encoded: EncodedInput, model: ServedModel) -> EncodedInput:
    check_context(encoded.length, model.card.context)
    if not encoded.tokens:
        raise InvalidRequest("An input has no tokens.", "input")
    return encoded


def texts_of(pairs: Sequence[tuple[str, str]]) -> dict[str, None]:
    """The texts of all pairs, each once, in order."""
    return dict.fromkeys(text for pair in pairs for text in pair)


def _cut(text: str, limit: int | None, tokenizer: Tokenizer) -> str:
    """The beginning of a text with at most `limit` tokens."""
    if limit is None or len(text) <= limit:
        return text
    ends = tokenizer.encode_batch([text], add_special_tokens=False)[0].offsets
    return text if len(ends) <= limit else text[: ends[limit - 1][1]]


def grouped(
    inputs: Sequence[EncodedInput], dimensions: int | None, task: str, context: int, salt: int
) -> Iterator[PromptTokens]:
    """The inputs in groups, none of more tokens than the longest input may have."""
    group: list[EncodedInput] = []
    tokens = 0
    for each in inputs:
        if group and (len(group) == GROUP or tokens + each.length > context):
            yield _prompt(group, dimensions, task, salt)
            group, tokens = [], 0
        group.append(each)
        tokens += each.length
    if group:
        yield _prompt(group, dimensions, task, salt)


def _prompt(
    group: list[EncodedInput], dimensions: int | None, task: str, salt: int
) -> PromptTokens:
    """A prompt without hashes: no later one begins with these inputs."""
    tokens = b"".join(each.tokens for each in group)
    scored = task == SCORE
    pooling = Pooling(
        task=task,
        lengths=[each.length for each in group],
        dimensions=dimensions,
        seconds=[each.second for each in group] if scored else [],
        pairs=[each.pair for each in group] if scored else [],
    )
    return PromptTokens(tokens, len(tokens) // TOKEN_BYTES, b"", salt, pooling=pooling)


def similarities(pairs: Sequence[tuple[str, str]], vectors: Sequence[bytes]) -> list[bytes]:
    """The cosine of the angle between the vectors of each pair's texts, packed like a vector."""
    rows = np.array([np.frombuffer(vector, "<f4") for vector in vectors])
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    place = {text: index for index, text in enumerate(texts_of(pairs))}
    return [
        np.float32(rows[place[first]] @ rows[place[second]]).tobytes() for first, second in pairs
    ]
