"""Preprocessing of a request: chat template, tokenizer, block hashes, limits."""

import datetime
import secrets
from collections.abc import Sequence
from time import monotonic
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import (
    GENERATE,
    ComputedAhead,
    Guided,
    Pooling,
    PromptImage,
    PromptParts,
    Retain,
    ShownAnswers,
)
from kvmesh.frontend.answers.answer import AnswerRun, answer_runs, is_call
from kvmesh.frontend.answers.restore import KnownAnswer, restore
from kvmesh.frontend.answers.store import AnswerStore
from kvmesh.frontend.apis.content.compaction import without_compacted
from kvmesh.frontend.apis.turns.bodies import Turns
from kvmesh.frontend.cache_account.comparison import PromptComparison
from kvmesh.frontend.conversation import (
    GenerateRequest,
    Message,
    RenderedPrompt,
    ShownImage,
    Text,
)
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates.chat_template import continued_text
from kvmesh.frontend.dialects.templates.frame_probe import CONTINUE
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads, Steps
from kvmesh.frontend.json_bounds import check_arguments
from kvmesh.frontend.metrics import restored_answers
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces, scope_sessions
from kvmesh.frontend.preprocess.attachments import images_behind_results, readable
from kvmesh.frontend.preprocess.conversation_key import (
    conversation_key,
    first_message_key,
    inferred_session,
)
from kvmesh.frontend.preprocess.edited_prompt import PromptCounter, apply_edits, note_compaction
from kvmesh.frontend.preprocess.images.loader import ImageLoader
from kvmesh.frontend.preprocess.images.placeholders import (
    prompt_images,
    shown_images,
    with_images,
)
from kvmesh.frontend.preprocess.limits import (
    check_context,
    check_prompt_memory,
    check_tokens,
    counted_tokens,
    output_limit,
)
from kvmesh.frontend.preprocess.output_form import OutputForm, output_form
from kvmesh.frontend.preprocess.prompt_encoder import LONG_TEXT, PromptEncoder
from kvmesh.frontend.preprocess.prompt_spans import locate_spans
from kvmesh.frontend.preprocess.retention import (
    TokenOffsets,
    explicit_retention,
    output_retention,
    prompt_retention,
)
from kvmesh.frontend.preprocess.shared_prefix import AGENT, shared_prefix
from kvmesh.frontend.preprocess.tool_results import in_call_order
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt, TextPiece, text_pieces
from kvmesh.frontend.turn_memo import NO_MEMO
from kvmesh.hashing import TOKEN_BYTES, block_hashes
from kvmesh.tracing.names import RENDER, TOKENIZE

T = TypeVar("T")
FoundAnswers = list[tuple[AnswerRun, KnownAnswer]]
LARGE_BODY = 128 << 10  # bytes; requests of more that are not light are preprocessed in a thread
MANY_MESSAGES = 256  # requests with more new messages are preprocessed in a thread, too
CUT = "\ue000kvmesh-next\ue000"  # stands for the text that a client is to send next
_PREPARED = "messages prepared before"
TAIL_CHARS = 256
MIN_MESSAGES = 3  # of a conversation with an earlier answer


class PromptTokens(Struct):
    """One prompt: `count` tokens as packed uint32, packed sequence hashes, retention directives.

    With `pooling`, it is inputs one behind the other.
    """

    tokens: bytes
    count: int
    sequence_hashes: bytes
    salt: int
    retention: Sequence[Retain] = ()
    pooling: Pooling | None = None
    images: Sequence[PromptImage] = ()


class PreparedRequest(Struct):
    """A request ready for dispatch; `max_tokens` fits the context after every prompt.

    `form` describes the answer: from it come its constraint, `guided`, and the output's parser.
    `decode` is the retention of the output. `speculates`: the next prompt may be prefilled after
    the answer, which is recorded for that. `ahead` is what a speculative prefill was to compute of
    the first prompt. `encoded` is the rendered conversation with its tokens until `comparison`
    compares it with the earlier prompt, one of the model `earlier_model` if that is another;
    `comparing` while it is looked up. `parts` are those of the conversation. `shown`: earlier
    answers, as they were generated; `keeps_answer`: the answer is stored for that. `text` is that
    of the prompt, if the stream annotates it.
    """

    request: GenerateRequest
    model: ServedModel
    adapter: str | None
    prompts: list[PromptTokens]
    max_tokens: int
    form: OutputForm
    guided: Guided | None
    decode: Retain | None = None
    speculates: bool = False
    ahead: ComputedAhead | None = None
    encoded: EncodedPrompt | None = None
    parts: PromptParts | None = None
    comparison: PromptComparison | None = None
    earlier_model: str | None = None
    comparing: bool = False
    shown: ShownAnswers | None = None
    keeps_answer: bool = False
    text: str = ""

    @property
    def prompt_tokens(self) -> int:
        return sum([prompt.count for prompt in self.prompts])

    @property
    def compacts(self) -> bool:
        """True if the conversation is to be summarized first."""
        return self.request.context_edits is not None and self.request.context_edits.compacts

    def computed_ahead(self, cached: int) -> ComputedAhead | None:
        """`ahead` with its use: the tokens among the first prompt's `cached` ones."""
        if self.ahead is None or self.ahead.differs:
            return self.ahead
        used = min(max(cached - self.ahead.first, 0), self.ahead.tokens)
        return replace(self.ahead, used=used)


class Preprocessor:
    """Renders, tokenizes and hashes prompts; long ones in threads, so as not to block the loop.

    With `share_prefixes`, agents' prompts begin with what their sessions share.
    """

    def __init__(
        self,
        memo_bytes: int,
        tenants: TenantNamespaces,
        answers: AnswerStore | None = None,
        share_prefixes: bool = False,
    ) -> None:
        self._tenants = tenants
        self.answers = answers if answers is not None and answers.enabled else None
        self._share_prefixes = share_prefixes
        self.encoder = PromptEncoder(memo_bytes // 2)
        self.turns = Turns(memo_bytes // 2, secrets.token_hex(16))
        self.threads = FairThreads()
        self.images: ImageLoader | None = None

    async def prepare(
        self, request: GenerateRequest, model: ServedModel, adapter: str | None
    ) -> PreparedRequest:
        """Render, tokenize and hash the prompts of a request, and name its session if unnamed.

        Raises ContextExceeded or InvalidRequest.
        """
        model.check_task(GENERATE)
        await self._load_images(request, model)
        self._arrange(request, model)
        _name_session(request)
        found = await self._stored(request, model)
        return await self._run(request, self._prepare(request, model, adapter, found))

    async def _load_images(self, request: GenerateRequest, model: ServedModel) -> None:
        if self.images is not None:
            await self.images.load(request, model.card)

    async def _stored(self, request: GenerateRequest, model: ServedModel) -> FoundAnswers:
        """The answers in a conversation that are stored."""
        if self.answers is None or len(request.messages) < MIN_MESSAGES:
            return []
        thinks = model.dialect.grammar.reasoning_parser is not None
        tenant = request.cache_salt
        named = answer_runs(request.messages, self.answers.names, tenant, request.memo)
        runs = [run for run in named if thinks or is_call(run.name)]
        known = await self.answers.find(tenant, first_message_key(request), runs)
        return [(run, known[run.name]) for run in runs if run.name in known]

    def _restore(
        self,
        request: GenerateRequest,
        model: ServedModel,
        found: FoundAnswers,
        forced: bool,
    ) -> ShownAnswers | None:
        """Show stored answers as they were generated."""
        if not found:
            return None
        if request.body_bytes >= LARGE_BODY:
            check_arguments(request.messages, request.memo)
        name, files = model.card.name, model.card.files

        def note(verdict: str) -> None:
            restored_answers.labels(name, verdict).inc()

        return restore(request, found, files, forced, note)

    def _arrange(self, request: GenerateRequest, model: ServedModel) -> None:
        """Bring the messages into the form that all later prompts show."""
        if request.thinking_budget == 0:
            request.thinking = False
        images = self.images is not None and bool(model.card.image_placeholder)
        field, memo = request.content_field, request.memo
        refused = {u: why for u, why in request.images.items() if isinstance(why, str)}
        messages, summary = without_compacted(request.messages, memo)
        if summary is not None:
            request.origin = summary.origin
        shown = readable(messages, images, field, memo, refused)
        request.messages = in_call_order(shown, memo)
        if request.images and not model.dialect.template.shows_images_in_results(request):
            request.messages = images_behind_results(request.messages)
        if self._share_prefixes and request.agent.startswith(AGENT):
            request.messages = list(shared_prefix(request.messages))

    def _prepare(
        self,
        request: GenerateRequest,
        model: ServedModel,
        adapter: str | None,
        found: FoundAnswers,
    ) -> Steps[PreparedRequest]:
        vocabulary = model.dialect.vocabulary
        check_tokens(request.sampling.stop_token_ids, vocabulary, "stop_token_ids")
        check_tokens(request.sampling.logit_bias, vocabulary, "logit_bias")
        continued = continued_text(request)
        if continued is not None and request.guided is not None:
            reason = "The last message cannot be continued and follow a schema as well."
            raise InvalidRequest(reason, "messages")
        salt = self.salt(request, model, adapter)
        form = output_form(request, model)
        shown = self._restore(request, model, found, form.rewrites_calls)
        yield from self._edit(request, model)
        began = monotonic()
        plain = model.dialect.template.is_plain(request)
        if not plain and request.body_bytes >= LARGE_BODY:
            yield  # many control tokens take long to part from the text
        rendered_prompt = RenderedPrompt("") if request.prompts else render(request, model, plain)
        text = rendered_prompt.text
        encoded: EncodedPrompt | None = None
        drops = False
        counted = counted_tokens(model.card.context)
        rendered = monotonic()
        if request.prompts:
            packed = []
            for prompt in request.prompts:
                packed.append((yield from self.encoder.raw_prompt(prompt, model, counted)))
                check_context(len(packed[-1]) // TOKEN_BYTES, model.card.context)
            retention = explicit_retention(request)
        else:
            encoded = yield from self.encoder.conversation(request, rendered_prompt, model, counted)
            packed = [encoded.tokens]
            note_compaction(request, len(encoded.tokens) // TOKEN_BYTES, model.card.context)
            check_context(len(encoded.tokens) // TOKEN_BYTES, model.card.context)
            drops = model.dialect.template.drops_thinking(request)
            retention = yield from self._retention(request, model, encoded, drops)
        check_prompt_memory(packed, request.n)
        pictures = shown_images(request)
        prompts = [hash_prompt(tokens, model, salt, retention, pictures) for tokens in packed]
        longest = max(prompt.count for prompt in prompts)
        limit = output_limit(request, len(prompts), longest, model.card.context)
        request.span.record(RENDER, began, rendered)
        request.span.record(TOKENIZE, rendered, monotonic())
        tail = text[-TAIL_CHARS:]
        if continued is not None:
            tail = model.dialect.grammar.tail_of(continued)
        decode = request.decode
        if encoded is not None:
            form = form.after(tail, request.thinking)
            decode = output_retention(request, form.begins_thinking, drops)
        return PreparedRequest(
            request,
            model,
            adapter,
            prompts,
            limit,
            form,
            form.constraint(),
            decode,
            encoded=encoded,
            shown=shown,
            keeps_answer=self.answers is not None
            and continued is None
            and bool(request.messages)
            and request.n == 1,
            text=(text or _raw_text(request)) if request.annotations else "",
        )

    def salt(self, request: GenerateRequest, model: ServedModel, adapter: str | None) -> int:
        """The salt of the hashes of a request's prompts."""
        return self._tenants.salt(model.card.name, adapter or "", request.cache_salt)

    async def count(self, request: GenerateRequest, model: ServedModel) -> list[bytes]:
        """Packed tokens of each prompt, as `prepare` makes them, with its errors for the prompt.

        A prompt may exceed the context, but not `counted_tokens`.
        """
        await self._load_images(request, model)
        self._arrange(request, model)
        found = await self._stored(request, model)
        return await self._run(request, self._count(request, model, found))

    def _count(
        self,
        request: GenerateRequest,
        model: ServedModel,
        found: FoundAnswers,
    ) -> Steps[list[bytes]]:
        counted = counted_tokens(model.card.context)
        if request.prompts:
            return [(yield from self.encoder.raw_prompt(request.prompts[0], model, counted))]
        self._restore(request, model, found, output_form(request, model).rewrites_calls)
        yield from self._edit(request, model)
        rendered = render(request, model)
        encoded = yield from self.encoder.conversation(request, rendered, model, counted)
        return [encoded.tokens]

    def _edit(self, request: GenerateRequest, model: ServedModel) -> Steps[None]:
        """Edit the conversation as the request asks."""
        if request.context_edits is not None and not request.prompts:
            counter = PromptCounter(
                model.card.context,
                lambda messages: self._count_messages(request, messages, model),
                lambda text: self.encoder.count_text(text, request.cache_salt, model),
            )
            drops = model.dialect.template.drops_thinking(request)
            yield from apply_edits(request, request.context_edits, drops, counter)

    def _count_messages(
        self, request: GenerateRequest, messages: list[Message], model: ServedModel
    ) -> Steps[int]:
        """Tokens of the prompt with these messages; raises ContextExceeded."""
        # a part of the conversation may end with any message
        closed = {k: v for k, v in request.template_args.items() if k != CONTINUE}
        changed = replace(request, messages=messages, template_args=closed, memo=NO_MEMO)
        rendered = render(changed, model)
        return (
            len((yield from self.encoder.conversation(changed, rendered, model)).tokens)
            // TOKEN_BYTES
        )

    async def ahead(
        self, request: GenerateRequest, model: ServedModel, adapter: str | None
    ) -> PromptTokens:
        """The prompt of a conversation up to its user's next message; raises as `prepare` does."""
        model.check_task(GENERATE)
        await self._load_images(request, model)
        self._arrange(request, model)
        _name_session(request)
        found = await self._stored(request, model)
        self._restore(request, model, found, output_form(request, model).rewrites_calls)
        messages = [*request.messages, Message("user", [Text(CUT)])]
        tokens = await self.tokens_before(replace(request, messages=messages), model)
        check_context(len(tokens) // TOKEN_BYTES, model.card.context)
        salt = self.salt(request, model, adapter)
        return hash_prompt(tokens, model, salt, explicit_retention(request))

    async def tokens_before(self, request: GenerateRequest, model: ServedModel) -> bytes:
        """Packed tokens of a conversation, up to the segment that contains the text `CUT`."""
        return await self._run(request, self._tokens_before(request, model))

    def _tokens_before(self, request: GenerateRequest, model: ServedModel) -> Steps[bytes]:
        rendered = render(request, model)
        end = rendered.text.find(CUT)
        if end < 0:
            return b""
        pieces = text_pieces(rendered._replace(text=rendered.text[:end]), model.dialect.encoder)
        return b"".join((yield from self.encoder.encode(pieces[:-1], request.cache_salt, model)))

    async def _run(self, request: GenerateRequest, steps: Steps[T]) -> T:
        same, _ = request.memo.recall(_PREPARED, request.messages)
        request.memo.note(_PREPARED, request.messages, None)
        few = len(request.messages) - same < MANY_MESSAGES
        small = few and (request.light or request.body_bytes < LARGE_BODY)
        return await self.threads.run_steps(request.owner, steps, at_once=small)

    def _retention(
        self, request: GenerateRequest, model: ServedModel, encoded: EncodedPrompt, drops: bool
    ) -> Steps[list[Retain]]:
        """Retention directives of a conversation; `drops`: later prompts lack its thinking."""
        offsets = TokenOffsets(encoded)
        spans = locate_spans(request, encoded.text, encoded.edges, drops)
        budget = LONG_TEXT + len(encoded.text)
        for edge, offset in offsets.inside_segments(spans):
            budget -= offset - edge
            if budget < 0:
                break  # earlier offsets are rounded down to their edge
            part = [TextPiece(encoded.text[edge:offset])]
            tokens = yield from self.encoder.encode(part, request.cache_salt, model)
            offsets.add(offset, b"".join(tokens))
        return prompt_retention(request, spans, offsets, model.card.block_size)


def _name_session(request: GenerateRequest) -> None:
    """Give the request the names of its conversation and session, within its tenant."""
    hints = scope_sessions(request.hints, request.cache_salt)
    request.hints = replace(hints, conversation=conversation_key(request))
    if hints.session is None and (session := inferred_session(request)) is not None:
        request.hints = replace(request.hints, session=session)


def render(request: GenerateRequest, model: ServedModel, plain: bool = False) -> RenderedPrompt:
    """The prompt's text; raises InvalidRequest if the template refuses the conversation.

    `plain`: its messages are known to have no control tokens.
    """
    if request.body_bytes >= LARGE_BODY:
        check_arguments(request.messages, request.memo)
    dialect = model.dialect
    try:
        today = datetime.date.today()
        rendered = dialect.template.prompt(request, today, dialect.end_tokens, plain)
    except TemplateError as error:
        raise InvalidRequest(
            f"The model's chat template refused the conversation: {error}", request.content_field
        ) from error
    rendered = rendered._replace(text=_encodable(rendered.text))
    return with_images(rendered, request, model.card.image_placeholder)


def _raw_text(request: GenerateRequest) -> str:
    """The first prompt of a request without messages, if it is text."""
    prompt = request.prompts[0] if request.prompts else ""
    return prompt if isinstance(prompt, str) else ""


def _encodable(text: str) -> str:
    r"""The text with U+FFFD for each half of a character, such as \ud83d in arguments."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def hash_prompt(
    tokens: bytes,
    model: ServedModel,
    salt: int,
    retention: list[Retain],
    images: Sequence[ShownImage] = (),
) -> PromptTokens:
    """The prompt of packed `tokens` with its hashes; raises InvalidRequest if it is empty."""
    if not tokens:
        raise InvalidRequest("The prompt has no tokens.", "prompt")
    _, sequence_hashes = block_hashes(tokens, model.card.block_size, salt)
    return PromptTokens(
        tokens,
        len(tokens) // 4,
        sequence_hashes,
        salt,
        retention,
        images=prompt_images(tokens, images),
    )
