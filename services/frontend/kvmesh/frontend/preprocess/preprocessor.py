"""From a request to tokens and block hashes: template, tokenizer, hashing, limits."""

import datetime
from array import array
from collections.abc import Iterator
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Guided, Retain
from kvmesh.frontend.conversation import GenerateRequest, Image, Text, ToolResult
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.errors import ContextExceeded, InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads, Steps
from kvmesh.frontend.http.json_bounds import check_arguments
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces, inferred, scope_sessions
from kvmesh.frontend.preprocess.prompt_spans import locate_spans
from kvmesh.frontend.preprocess.retention import TokenOffsets, directives, retained
from kvmesh.frontend.preprocess.session_inference import InferredSessions
from kvmesh.frontend.preprocess.tool_choice import RequiredToolCall, optional, required_tool_call
from kvmesh.frontend.tokenizer.encoder import SegmentMemo
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt, PrefixTokenCache
from kvmesh.frontend.tokenizer.text_slices import check_runs
from kvmesh.hashing import TOKEN_BYTES, block_hashes

T = TypeVar("T")
LONG_TEXT = 8192
LARGE = 128 << 10  # bytes of a body whose request is prepared in a thread
MANY = 256  # messages that make a request large, too
SLICE_TOKENS = 4096
TAIL = 256
PROMPT_BYTES = 64 << 20  # packed tokens, of all answers of a request
ANSWER_BYTES = 256 << 20  # of one request, for all of its answers
ANSWER_TOKEN_BYTES = 64
LOGPROB_BYTES = 400


class PromptTokens(Struct):
    """One sequence's prompt: `count` tokens as packed uint32, and its packed sequence hashes.

    `retention` says how dearly its tokens are kept.
    """

    tokens: bytes
    count: int
    sequence_hashes: bytes
    salt: int
    retention: list[Retain] = []


class PreparedRequest(Struct):
    """A request that is ready to be placed; `max_tokens` fits every prompt.

    `tail` is the end of the rendered conversation: it tells whether thinking has begun.
    """

    request: GenerateRequest
    model: ServedModel
    adapter: str | None
    prompts: list[PromptTokens]
    max_tokens: int
    tail: str
    required_tool_call: RequiredToolCall | None
    guided: Guided | None

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.count for prompt in self.prompts)


class Preprocessor:
    """Renders, tokenizes and hashes; what is long in threads, so that other streams go on.

    No more tokens are made than fit the model, by one slice at most.
    """

    def __init__(self, memo_bytes: int, tenants: TenantNamespaces) -> None:
        self._tenants = tenants
        self._memo = SegmentMemo(memo_bytes // 3 * 2)
        self._beginnings = PrefixTokenCache(memo_bytes // 3)
        self._sessions = InferredSessions()
        self.threads = FairThreads()

    async def prepare(
        self, request: GenerateRequest, model: ServedModel, adapter: str | None
    ) -> PreparedRequest:
        """Raises ContextExceeded, or InvalidRequest if there is nothing to send to an engine."""
        request.hints = scope_sessions(request.hints, request.cache_salt)
        made = await self._run(request, self._prepared(request, model, adapter))
        if request.messages and request.hints.session is None:
            self._infer_session(request, made.prompts[0], model.card.block_size)
        return made

    def _prepared(
        self, request: GenerateRequest, model: ServedModel, adapter: str | None
    ) -> Steps[PreparedRequest]:
        if not model.card.images:
            _refuse_images(request)
        seed = self._tenants.salt(model.card.name, adapter or "", request.cache_salt)
        must_call = required_tool_call(request)
        text = "" if request.prompts else render(request, model)
        if request.prompts:
            packed, kept = (yield from self._given(request, model)), directives(request)
        else:
            whole = yield from self._conversation(request, text, model)
            packed = [whole.tokens]
            kept = yield from self._retained(request, model, whole)
        _check_copies(packed, request.n)
        prompts = [prompt_of(tokens, model, seed, kept) for tokens in packed]
        longest = max(prompt.count for prompt in prompts)
        limit = output_limit(request, len(prompts), longest, model.card.context)
        tail, guided = text[-TAIL:], _guided(request, model, must_call)
        return PreparedRequest(request, model, adapter, prompts, limit, tail, must_call, guided)

    def _infer_session(
        self, request: GenerateRequest, prompt: PromptTokens, block_size: int
    ) -> None:
        tenant = request.cache_salt
        session = self._sessions.observe(tenant, prompt.sequence_hashes, prompt.tokens, block_size)
        if session is not None:
            request.hints = replace(request.hints, session=inferred(tenant, session))

    async def count(self, request: GenerateRequest, model: ServedModel) -> list[bytes]:
        """The tokens that `prepare` would send to an engine, with its errors about the prompt."""
        return await self._run(request, self._counted(request, model))

    def _counted(self, request: GenerateRequest, model: ServedModel) -> Steps[list[bytes]]:
        if not model.card.images:
            _refuse_images(request)
        if request.prompts:
            return (yield from self._given(request, model))
        text = render(request, model)
        return [(yield from self._conversation(request, text, model)).tokens]

    async def beginning(self, request: GenerateRequest, model: ServedModel, cut: str) -> bytes:
        """Packed tokens of a conversation, up to the segment in which the text `cut` stands."""
        return await self._run(request, self._beginning(request, model, cut))

    def _beginning(self, request: GenerateRequest, model: ServedModel, cut: str) -> Steps[bytes]:
        text, found, _ = render(request, model).partition(cut)
        segments = model.dialect.encoder.segments(text)[:-1] if found else []
        return b"".join((yield from self._encoded(segments, request.cache_salt, model)))

    async def _run(self, request: GenerateRequest, steps: Steps[T]) -> T:
        small = request.size < LARGE and len(request.messages) < MANY
        return await self.threads.finish(request.owner, steps, at_once=small)

    def _given(self, request: GenerateRequest, model: ServedModel) -> Steps[list[bytes]]:
        """Packed tokens of prompts that need no template."""
        found = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                found.append((yield from self._plain(prompt, model)))
            else:
                found.append(_packed(prompt))
        return found

    def _plain(self, text: str, model: ServedModel) -> Steps[bytes]:
        """Packed tokens of a text outside any conversation."""
        check_fits(text, model)
        if len(text) >= LONG_TEXT:
            yield
        return (yield from _gathered(model.dialect.encoder.text_steps(text), model))

    def _conversation(
        self, request: GenerateRequest, text: str, model: ServedModel
    ) -> Steps[EncodedPrompt]:
        """The tokens of a rendered conversation, of which only what is new is looked at."""
        check_fits(text, model)
        encoder, tenant = model.dialect.encoder, request.cache_salt
        key = self._memo_of(tenant, model), hash(_conversation_name(request))
        known = self._beginnings.find(key, text, encoder.longest_marker)
        segments = encoder.segments(text[known.end :])
        if len(segments) > model.card.context:
            raise ContextExceeded(len(segments), None, model.card.context)
        tokens = yield from self._encoded(segments, tenant, model)
        encoded = known.extended(text, segments, tokens)
        if len(text) >= LONG_TEXT:
            self._beginnings.keep(key, encoded)
        return encoded

    def _encoded(self, segments: list[str], tenant: str, model: ServedModel) -> Steps[list[bytes]]:
        """Packed tokens of each segment, out of the memo where they are in it."""
        memo, seed = self._memo, self._memo_of(tenant, model)
        known = [memo.get(seed, segment) for segment in segments]
        missing = sum(len(s) for s, t in zip(segments, known, strict=True) if t is None)
        if missing >= LONG_TEXT:
            yield
        made, count = [], 0
        for segment, tokens in zip(segments, known, strict=True):
            if tokens is None:
                tokens = yield from _gathered(model.dialect.encoder.steps(segment), model, count)
                memo.put(seed, segment, tokens)
            made.append(tokens)
            count += len(tokens) // TOKEN_BYTES
        return made

    def _memo_of(self, tenant: str, model: ServedModel) -> int:
        """The key that keeps texts of one tenant and tokenizer apart from those of others."""
        return self._tenants.salt(model.card.files, "", tenant)

    def _retained(
        self, request: GenerateRequest, model: ServedModel, whole: EncodedPrompt
    ) -> Steps[list[Retain]]:
        """What is to be kept of a conversation, and how."""
        ruler = TokenOffsets(whole)
        found = locate_spans(
            request, whole.text, whole.edges, model.dialect.template.drops_thinking
        )
        room = LONG_TEXT + len(whole.text)
        for edge, place in ruler.cuts(found):
            if (room := room - (place - edge)) < 0:
                break  # marks further ahead count from the edge before them
            part = [whole.text[edge:place]]
            ruler.cut(place, b"".join((yield from self._encoded(part, request.cache_salt, model))))
        return retained(request, found, ruler, model.card.block_size)


def check_fits(text: str, model: ServedModel) -> None:
    """Refuse what has too many bytes for the context, whatever its tokens are."""
    longest, context = model.dialect.encoder.longest_token, model.card.context
    if longest is not None:
        size = len(text) if text.isascii() else len(text.encode())
        if size > context * longest:
            raise ContextExceeded(-(-size // longest), None, context)
    check_runs(text)


def _gathered(slices: Iterator[bytes], model: ServedModel, before: int = 0) -> Steps[bytes]:
    """The tokens of a text; ContextExceeded as soon as they and those `before` do not fit."""
    parts, count = [], before
    for tokens in slices:
        parts.append(tokens)
        count += len(tokens) // TOKEN_BYTES
        if count > model.card.context:
            raise ContextExceeded(count, None, model.card.context)
        if len(tokens) >= SLICE_TOKENS or not tokens:
            yield
    return b"".join(parts)


def _conversation_name(request: GenerateRequest) -> str:
    """What turns of a conversation have in common, and most others have not."""
    if request.hints.session is not None:
        return request.hints.session
    asked = next((m.blocks[-1] for m in request.messages if m.role == "user" and m.blocks), None)
    return asked.text if isinstance(asked, Text) else ""


def _guided(
    request: GenerateRequest, model: ServedModel, must_call: RequiredToolCall | None
) -> Guided | None:
    if must_call is not None:
        return must_call.guided
    if request.guided is not None or not model.card.structural_tags:
        return request.guided
    return optional(request, model.dialect.grammar.tool_parser)


def _check_copies(packed: list[bytes], n: int) -> None:
    """Each answer is placed by itself, with the whole prompt."""
    if n * sum(map(len, packed)) > PROMPT_BYTES:
        most = PROMPT_BYTES // TOKEN_BYTES
        raise InvalidRequest(
            f"The prompts of all answers together have more than {most} tokens.", "n"
        )


def output_limit(request: GenerateRequest, prompts: int, longest: int, context: int) -> int:
    """The tokens that each of the answers may have: those asked for, or as many as fit.

    All answers together are held until the last one ends, so that memory bounds them, too.
    """
    asked = request.sampling.max_tokens
    if longest >= context:
        raise ContextExceeded(longest, None, context)
    if longest + asked > context:
        raise ContextExceeded(longest, asked, context)
    logprobs = request.sampling.logprobs
    size = ANSWER_TOKEN_BYTES + (0 if logprobs is None else LOGPROB_BYTES * (1 + logprobs))
    most = ANSWER_BYTES // (size * prompts * request.n)
    if asked > most:
        reason = f"{prompts * request.n} answers with what is asked of them may have {most} tokens"
        raise InvalidRequest(f"`max_tokens`: {reason} each, not {asked}.", "max_tokens")
    return min(asked or context - longest, most)


def render(request: GenerateRequest, model: ServedModel) -> str:
    """The prompt's text; a conversation that the template refuses is the caller's error."""
    if request.size >= LARGE:
        check_arguments(request.messages)
    try:
        return model.dialect.template.render(request, datetime.date.today())
    except TemplateError as error:
        raise InvalidRequest(
            f"The model's chat template refused the conversation: {error}", "messages"
        ) from error


def _packed(ids: list[int]) -> bytes:
    try:
        return array("I", ids).tobytes()
    except OverflowError as error:
        raise InvalidRequest("A token id is negative or too large.", "prompt") from error


def prompt_of(tokens: bytes, model: ServedModel, seed: int, kept: list[Retain]) -> PromptTokens:
    """Raises InvalidRequest for a prompt without tokens."""
    if not tokens:
        raise InvalidRequest("The prompt has no tokens.", "prompt")
    _, sequence = block_hashes(tokens, model.card.block_size, seed)
    return PromptTokens(tokens, len(tokens) // TOKEN_BYTES, sequence, seed, kept)


def _refuse_images(request: GenerateRequest) -> None:
    for index, message in enumerate(request.messages):
        for block in message.blocks:
            held = type(block) is ToolResult and any(type(part) is Image for part in block.content)
            if held or type(block) is Image:
                where = f"messages[{index}].content"
                raise InvalidRequest(f"`{where}`: this model does not read images.", where)
