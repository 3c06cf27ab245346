"""Tokens of prompts: raw ones, and rendered conversations, of which a turn encodes what it adds."""

from array import array
from collections.abc import Iterator

from kvmesh.frontend.conversation import GenerateRequest, RenderedPrompt
from kvmesh.frontend.errors import ContextExceeded, InvalidRequest
from kvmesh.frontend.fair_threads import Steps
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.namespaces import is_inferred
from kvmesh.frontend.preprocess.conversation_key import conversation_key
from kvmesh.frontend.tokenizer.encoder import SegmentMemo
from kvmesh.frontend.tokenizer.prefix_cache import (
    EncodedPrompt,
    PrefixTokenCache,
    TextPiece,
    text_pieces,
)
from kvmesh.frontend.tokenizer.text_slices import check_runs
from kvmesh.hashing import TOKEN_BYTES

LONG_TEXT = 8192
SLICE_TOKENS = 4096
MAX_CHAR_BYTES = 4  # of UTF-8


class PromptEncoder:
    """Encodes prompts in steps; `memo_bytes` for the tokens of texts seen before.

    Tokenizing stops at most one slice beyond the model's context.
    """

    def __init__(self, memo_bytes: int) -> None:
        self._memo = SegmentMemo(memo_bytes // 3 * 2)
        self._prefix_cache = PrefixTokenCache(memo_bytes // 3)

    def raw_prompts(self, request: GenerateRequest, model: ServedModel) -> Steps[list[bytes]]:
        """Packed tokens of prompts without a template: texts and token ids."""
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompts.append((yield from self._raw_text(prompt, model)))
            else:
                prompts.append(_pack(prompt))
        return prompts

    def _raw_text(self, text: str, model: ServedModel) -> Steps[bytes]:
        """Packed tokens of one text, with the special tokens that the tokenizer adds."""
        check_fits(text, model)
        if len(text) >= LONG_TEXT:
            yield
        return (yield from _collect(model.dialect.encoder.text_steps(text), model))

    def conversation(
        self, request: GenerateRequest, rendered: RenderedPrompt, model: ServedModel
    ) -> Steps[EncodedPrompt]:
        """Tokens of a rendered conversation; only text after the cached prefix is processed."""
        text = rendered.text
        check_fits(text, model)
        encoder, tenant = model.dialect.encoder, request.cache_salt
        key = self._memo_key(tenant, model), hash(_shared_key(request))
        cached = self._prefix_cache.get(key, rendered, encoder.longest_marker)
        cached = cached.outside(rendered.insertions)
        pieces = text_pieces(rendered, encoder, cached.end)
        if len(pieces) > model.card.context:
            raise ContextExceeded(len(pieces), None, model.card.context)
        tokens = yield from self.encode(pieces, tenant, model)
        encoded = cached.extended(rendered, [piece.text for piece in pieces], tokens)
        if len(text) >= LONG_TEXT:
            self._prefix_cache.put(key, encoded)
        return encoded

    def encode(
        self, pieces: list[TextPiece], tenant: str, model: ServedModel
    ) -> Steps[list[bytes]]:
        """Packed tokens of each piece, if they are not known from the memo where possible."""
        memo, key = self._memo, self._memo_key(tenant, model)
        cached = [p.tokens if p.tokens is not None else memo.get(key, p.text) for p in pieces]
        missing = sum(len(p.text) for p, t in zip(pieces, cached, strict=True) if t is None)
        if missing >= LONG_TEXT:
            yield
        encoded, count = [], 0
        for (segment, _), tokens in zip(pieces, cached, strict=True):
            if tokens is None:
                tokens = yield from _collect(model.dialect.encoder.steps(segment), model, count)
                memo.put(key, segment, tokens)
            encoded.append(tokens)
            count += len(tokens) // 4
        return encoded

    def count_text(self, text: str, tenant: str, model: ServedModel) -> Steps[int]:
        """Tokens of a text on its own; raises ContextExceeded."""
        check_fits(text, model)
        (tokens,) = yield from self.encode([TextPiece(text)], tenant, model)
        return len(tokens) // TOKEN_BYTES

    def _memo_key(self, tenant: str, model: ServedModel) -> int:
        """A key that separates the cached texts of tenants and of tokenizers."""
        return hash((model.card.files, tenant))


def check_fits(text: str, model: ServedModel) -> None:
    """Raise ContextExceeded for a text with more bytes than a full context of longest tokens."""
    longest, context = model.dialect.encoder.longest_token, model.card.context
    if longest is not None and len(text) * MAX_CHAR_BYTES > context * longest:
        size = len(text) if text.isascii() else len(text.encode())
        if size > context * longest:
            raise ContextExceeded(-(-size // longest), None, context)
    check_runs(text)


def _collect(slices: Iterator[bytes], model: ServedModel, count: int = 0) -> Steps[bytes]:
    """The tokens of a text after `count` others; raises ContextExceeded once they do not fit."""
    parts = []
    for tokens in slices:
        parts.append(tokens)
        count += len(tokens) // TOKEN_BYTES
        if count > model.card.context:
            raise ContextExceeded(count, None, model.card.context)
        if len(tokens) >= SLICE_TOKENS or not tokens:
            yield
    return b"".join(parts)


def _shared_key(request: GenerateRequest) -> tuple[str, int]:
    """The key that turns of a conversation share, with the session if the client names it."""
    session = request.hints.session or ""
    key = request.hints.conversation or conversation_key(request)
    return "" if is_inferred(session) else session, key


def _pack(ids: list[int]) -> bytes:
    try:
        return array("I", ids).tobytes()
    except OverflowError as error:
        raise InvalidRequest("A token id is negative or too large.", "prompt") from error
