"""From a request to tokens and block hashes: template, tokenizer, hashing, limits."""

import asyncio
import datetime
from array import array
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Guided, Retain
from kvmesh.frontend.beginnings import Beginnings, Encoded
from kvmesh.frontend.conversation import GenerateRequest, Image, Text, ToolResult
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.encode import SegmentMemo
from kvmesh.frontend.errors import ContextExceeded, InvalidRequest
from kvmesh.frontend.forced import Forced, forced, optional
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.places import survey
from kvmesh.frontend.retention import Ruler, directives, retained
from kvmesh.frontend.sessions import InferredSessions
from kvmesh.frontend.tenants import Tenants, apart, inferred
from kvmesh.index import block_hashes

LONG_TEXT = 8192
TAIL = 256


class Prompt(Struct):
    """One sequence's prompt: `count` tokens as packed uint32, and its packed sequence hashes.

    `retention` says how dearly its tokens are kept.
    """

    tokens: bytes
    count: int
    sequence: bytes
    salt: int
    retention: list[Retain] = []


class Prepared(Struct):
    """A request that is ready to be placed; `max_tokens` fits every prompt.

    `tail` is the end of the rendered conversation: it tells whether thinking has begun.
    """

    request: GenerateRequest
    model: ServedModel
    adapter: str | None
    prompts: list[Prompt]
    max_tokens: int
    tail: str
    forced: Forced | None
    guided: Guided | None

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.count for prompt in self.prompts)


class Preparer:
    """Renders, tokenizes and hashes; long texts in a thread, so that other streams go on."""

    def __init__(self, memo_bytes: int, tenants: Tenants) -> None:
        self._tenants = tenants
        self._memo = SegmentMemo(memo_bytes // 3 * 2)
        self._beginnings = Beginnings(memo_bytes // 3)
        self._sessions = InferredSessions()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def prepare(
        self, request: GenerateRequest, model: ServedModel, adapter: str | None
    ) -> Prepared:
        """Raises ContextExceeded, or InvalidRequest if there is nothing to send to an engine."""
        if not model.card.images:
            _refuse_images(request)
        request.hints = apart(request.hints, request.cache_salt)
        seed = self._tenants.salt(model.card.name, adapter or "", request.cache_salt)
        must_call = forced(request)
        text = "" if request.prompts else render(request, model)
        if request.prompts:
            packed, kept = await self._given(request, model), directives(request)
        else:
            whole = await self._conversation(request, text, model)
            packed, kept = [whole.tokens], await self._retained(request, model, whole)
        prompts = [prompt_of(tokens, model, seed, kept) for tokens in packed]
        if request.messages and request.hints.session is None:
            self._infer_session(request, prompts[0], model.card.block_size)
        longest = max(prompt.count for prompt in prompts)
        limit = _output_limit(request.sampling.max_tokens, longest, model.card.context)
        tail, guided = text[-TAIL:], _guided(request, model, must_call)
        return Prepared(request, model, adapter, prompts, limit, tail, must_call, guided)

    def _infer_session(self, request: GenerateRequest, prompt: Prompt, block_size: int) -> None:
        tenant = request.cache_salt
        session = self._sessions.observe(tenant, prompt.sequence, prompt.tokens, block_size)
        if session is not None:
            request.hints = replace(request.hints, session=inferred(tenant, session))

    async def count(self, request: GenerateRequest, model: ServedModel) -> list[bytes]:
        """The tokens that `prepare` would send to an engine, with its errors about the prompt."""
        if not model.card.images:
            _refuse_images(request)
        if request.prompts:
            return await self._given(request, model)
        text = render(request, model)
        return [(await self._conversation(request, text, model)).tokens]

    async def beginning(self, request: GenerateRequest, model: ServedModel, cut: str) -> bytes:
        """Packed tokens of a conversation, up to the segment in which the text `cut` stands."""
        text, found, _ = render(request, model).partition(cut)
        segments = model.dialect.encoder.segments(text)[:-1] if found else []
        return b"".join(await self._encoded(segments, request.cache_salt, model))

    async def _given(self, request: GenerateRequest, model: ServedModel) -> list[bytes]:
        """Packed tokens of prompts that need no template."""
        return [
            await self.plain(prompt, model) if isinstance(prompt, str) else _packed(prompt)
            for prompt in request.prompts
        ]

    async def plain(self, text: str, model: ServedModel) -> bytes:
        """Packed tokens of a text outside any conversation."""
        if len(text) < LONG_TEXT:
            return model.dialect.encoder.encode_text(text)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, model.dialect.encoder.encode_text, text)

    async def _conversation(
        self, request: GenerateRequest, text: str, model: ServedModel
    ) -> Encoded:
        """The tokens of a rendered conversation, of which only what is new is looked at."""
        encoder, tenant = model.dialect.encoder, request.cache_salt
        key = self._memo_of(tenant, model), hash(_conversation_name(request))
        known = self._beginnings.find(key, text, encoder.longest_marker)
        segments = encoder.segments(text[known.end :])
        encoded = known.extended(text, segments, await self._encoded(segments, tenant, model))
        if len(text) >= LONG_TEXT:
            self._beginnings.keep(key, encoded)
        return encoded

    async def _encoded(self, segments: list[str], tenant: str, model: ServedModel) -> list[bytes]:
        """Packed tokens of each segment, out of the memo where they are in it."""
        memo, seed = self._memo, self._memo_of(tenant, model)
        known = [memo.get(seed, segment) for segment in segments]
        missing = [s for s, tokens in zip(segments, known, strict=True) if tokens is None]
        if missing:
            found = iter(await self._encode(missing, model))
            for place, segment in enumerate(segments):
                if known[place] is None:
                    known[place] = tokens = next(found)
                    memo.put(seed, segment, tokens)
        return [tokens for tokens in known if tokens is not None]

    def _memo_of(self, tenant: str, model: ServedModel) -> int:
        """What keeps the texts of one tenant and tokenizer apart from those of others."""
        return self._tenants.salt(model.card.files, "", tenant)

    async def _retained(
        self, request: GenerateRequest, model: ServedModel, whole: Encoded
    ) -> list[Retain]:
        """What is to be kept of a conversation, and how."""
        ruler = Ruler(whole)
        found = survey(request, whole.text, whole.edges, model.dialect.template.drops_thinking)
        if cuts := ruler.cuts(found):
            tokens = await self._encoded(list(cuts.values()), request.cache_salt, model)
            for place, packed in zip(cuts, tokens, strict=True):
                ruler.cut(place, packed)
        return retained(request, found, ruler, model.card.block_size)

    async def _encode(self, segments: list[str], model: ServedModel) -> list[bytes]:
        encoder = model.dialect.encoder
        if sum(map(len, segments)) < LONG_TEXT:
            return encoder.encode_segments(segments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, encoder.encode_segments, segments)


def _conversation_name(request: GenerateRequest) -> str:
    """What turns of a conversation have in common, and most others have not."""
    if request.hints.session is not None:
        return request.hints.session
    asked = next((m.blocks[-1] for m in request.messages if m.role == "user" and m.blocks), None)
    return asked.text if isinstance(asked, Text) else ""


def _guided(
    request: GenerateRequest, model: ServedModel, must_call: Forced | None
) -> Guided | None:
    if must_call is not None:
        return must_call.guided
    if request.guided is not None or not model.card.structural_tags:
        return request.guided
    return optional(request, model.dialect.grammar.tool_parser)


def _output_limit(asked: int, longest: int, context: int) -> int:
    if longest >= context:
        raise ContextExceeded(longest, None, context)
    if longest + asked > context:
        raise ContextExceeded(longest, asked, context)
    return asked or context - longest


def render(request: GenerateRequest, model: ServedModel) -> str:
    """The prompt's text; a conversation that the template refuses is the caller's error."""
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


def prompt_of(tokens: bytes, model: ServedModel, seed: int, kept: list[Retain]) -> Prompt:
    """Raises InvalidRequest for a prompt without tokens."""
    if not tokens:
        raise InvalidRequest("The prompt has no tokens.", "prompt")
    _, sequence = block_hashes(tokens, model.card.block_size, seed)
    return Prompt(tokens, len(tokens) // 4, sequence, seed, kept)


def _refuse_images(request: GenerateRequest) -> None:
    for index, message in enumerate(request.messages):
        for block in message.blocks:
            held = type(block) is ToolResult and any(type(part) is Image for part in block.content)
            if held or type(block) is Image:
                where = f"messages[{index}].content"
                raise InvalidRequest(f"`{where}`: this model does not read images.", where)
