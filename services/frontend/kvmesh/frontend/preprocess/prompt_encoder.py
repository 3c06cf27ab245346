"""Tokens of prompts: raw ones, and rendered conversations, of which a turn encodes what it adds."""

from array import array
from collections.abc import Iterator

from kvmesh.frontend.conversation import GenerateRequest, RenderedPrompt
from kvmesh.frontend.errors import ContextExceeded
from kvmesh.frontend.fair_threads import Steps
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.namespaces import is_inferred
from kvmesh.frontend.preprocess.conversation_key import conversation_key
from kvmesh.frontend.preprocess.limits import check_tokens
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
STEP_BYTES = 64 << 10  # of packed tokens, after which others have their turn
MAX_CHAR_BYTES = 4  # of UTF-8


class PromptEncoder:
    """Encodes prompts in steps; `memo_bytes` for the tokens of texts seen before.

    Tokenizing stops at most one slice beyond `limit` tokens, None: the model's context, by
    ContextExceeded. Nothing of a prompt beyond the context is kept in memory.
    """

    def __init__(self, memo_bytes: int) -> None:
        self._memo = SegmentMemo(memo_bytes // 3 * 2)
        self._prefix_cache = PrefixTokenCache(memo_bytes // 3)

    def raw_prompt(
        self,
        prompt: str | list[int],
        model: ServedModel,
        limit: int | None = None,
        field: str = "prompt",
    ) -> Steps[bytes]:
        """Packed tokens of a prompt without a template, with the special ones of the tokenizer.

        `field` is its name in the body, for errors.
        """
        if not isinstance(prompt, str):
            check_tokens(prompt, model.dialect.vocabulary, field)
            return array("I", prompt).tobytes()
        check_fits(prompt, model, limit)
        if len(prompt) >= LONG_TEXT:
            yield
        return (yield from _collect(model.dialect.encoder.text_steps(prompt), model, limit))

    def conversation(
        self,
        request: GenerateRequest,
        rendered: RenderedPrompt,
        model: ServedModel,
        limit: int | None = None,
    ) -> Steps[EncodedPrompt]:
        """Tokens of a rendered conversation; only text after the cached prefix is processed."""
        text, most = rendered.text, limit or model.card.context
        check_fits(text, model, limit)
        encoder, tenant = model.dialect.encoder, request.cache_salt
        key = self._memo_key(tenant, model), hash(_shared_key(request))
        cached = self._prefix_cache.get(key, rendered, encoder.longest_marker)
        cached = cached.outside(rendered.insertions)
        pieces = text_pieces(rendered, encoder, cached.end)
        if len(pieces) > most:
            raise ContextExceeded(len(pieces), None, model.card.context, at_least=True)
        tokens = yield from self.encode(pieces, tenant, model, limit)
        encoded = cached.extended(rendered, [piece.text for piece in pieces], tokens)
        if len(text) >= LONG_TEXT and len(encoded.tokens) <= TOKEN_BYTES * model.card.context:
            self._prefix_cache.put(key, encoded)
        return encoded

    def encode(
        self, pieces: list[TextPiece], tenant: str, model: ServedModel, limit: int | None = None
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
                slices = model.dialect.encoder.steps(segment)
                tokens = yield from _collect(slices, model, limit, count)
                if count + len(tokens) // TOKEN_BYTES <= model.card.context:
                    memo.put(key, segment, tokens)
            encoded.append(tokens)
            count += len(tokens) // TOKEN_BYTES
        return encoded

    def count_text(self, text: str, tenant: str, model: ServedModel) -> Steps[int]:
        """Tokens of a text on its own; raises ContextExceeded."""
        check_fits(text, model)
        (tokens,) = yield from self.encode([TextPiece(text)], tenant, model)
        return len(tokens) // TOKEN_BYTES

    def _memo_key(self, tenant: str, model: ServedModel) -> int:
        """A key that separates the cached texts of tenants and of tokenizers."""
        return hash((model.card.files, tenant))


def check_fits(text: str, model: ServedModel, limit: int | None = None) -> None:
    """Raise ContextExceeded for a text with more bytes than `limit` of the longest tokens."""
    longest, most = model.dialect.encoder.longest_token, limit or model.card.context
    if longest is not None and len(text) * MAX_CHAR_BYTES > most * longest:
        size = len(text) if text.isascii() else len(text.encode())
        if size > most * longest:
            raise ContextExceeded(-(-size // longest), None, model.card.context, at_least=True)
    check_runs(text)


def _collect(
    slices: Iterator[bytes], model: ServedModel, limit: int | None, count: int = 0
) -> Steps[bytes]:
    """The tokens of a text after `count` others; raises ContextExceeded beyond `limit`."""
    parts, most, size = [], limit or model.card.context, 0
    for tokens in slices:
        parts.append(tokens)
        size += len(tokens)
        count += len(tokens) // TOKEN_BYTES
        if count > most:
            raise ContextExceeded(count, None, model.card.context, at_least=True)
        if size >= STEP_BYTES or not tokens:
            size = 0
            yield
    return b"".join(parts)


def _shared_key(request: GenerateRequest) -> tuple[str, int]:
    """The key that turns of a conversation share, with the session if the client names it."""
    session = request.hints.session or ""
    key = request.hints.conversation or conversation_key(request)
    return "" if is_inferred(session) else session, key
