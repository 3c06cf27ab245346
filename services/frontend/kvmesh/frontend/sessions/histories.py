"""The history of each conversation: compares its prompts, and finds those that always change."""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from msgspec.structs import replace

from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import DIVERGED, PromptParts, SessionPrompt, owner
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.transcript import Transcript
from kvmesh.frontend.cache_account.comparison import (
    PromptComparison,
    compare,
    described,
)
from kvmesh.frontend.cache_account.differences import AnswerForm, ComparedPrompt
from kvmesh.frontend.cache_account.fingerprints import continued, fingerprints
from kvmesh.frontend.conversation import Block, GenerateRequest
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.namespaces import inferred, is_inferred, own_name
from kvmesh.frontend.preprocess.conversation_key import MASK
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, PromptTokens
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
MOVING_TURNS = 3  # consecutive turns that change in one part of the prompt
MAX_TASKS = 256
TAIL_TOKENS = 32  # of a prompt, which show whether the answer begins with thinking


class Histories:
    """Call `begin` once a request is prepared, and `end` at its end.

    The prompts of requests that name no session are stored by their first message.
    """

    def __init__(self, last_prompts: LastPrompts) -> None:
        self._last_prompts = last_prompts
        self._tasks = BackgroundTasks()
        self._reported = LogOnce()

    def begin(self, prepared: PreparedRequest) -> str | None:
        """Compare the prompt with the earlier one, and store it; return the session's name.

        An earlier one that another frontend has is compared later, if it is found. None if the
        request has several prompts, or one of tokens without a session.
        """
        if len(prepared.prompts) != 1:
            return None
        request, model = prepared.request, prepared.model.card.name
        session = _session(request)
        if session is None:
            return None
        current = SessionPrompt(
            prepared.prompts[0].tokens,
            prepared.adapter,
            prepared.prompts[0].salt,
            request.id,
            time.time(),
            request.hints.conversation,
        )
        last = self._last_prompts.earlier(model, session, current)
        prepared.parts = _parts(request, current, last)
        current = replace(current, parts=prepared.parts)
        earlier = self._earlier(prepared, model, session, current, last)
        encoded, prepared.encoded = prepared.encoded, None
        if earlier is not None:
            current = replace(current, change=_compare(prepared, encoded, earlier).change)
        if request.continues and not _is_earlier(request, earlier) and len(self._tasks) < MAX_TASKS:
            prepared.comparing = earlier is None
            self._tasks.start(self._find(prepared, encoded, session, current))
        self._last_prompts.store(model, session, current, earlier)
        return session

    def end(self, prepared: PreparedRequest, session: str, stream: TokenStream) -> None:
        """Add the output to the stored prompt, and report a prompt that moves every turn."""
        request = prepared.request
        output = array("I", stream.tokens).tobytes() if request.n == 1 else b""
        self._last_prompts.complete(prepared.model.card.name, session, request.id, output)
        compared = prepared.comparison
        if compared is not None and compared.change is not None and compared.reason == DIVERGED:
            _report_moving(prepared, compared, self._reported)

    async def close(self) -> None:
        await self._tasks.close()

    def _earlier(
        self,
        prepared: PreparedRequest,
        model: str,
        session: str,
        current: SessionPrompt,
        last: SessionPrompt | None,
    ) -> SessionPrompt | None:
        """The earlier prompt that this frontend has; the one that the request names, if any.

        `last` is the last one of the same conversation.
        """
        request = prepared.request
        if request.previous_message:
            found = self._last_prompts.of_request(
                request.previous_message, owner(request.cache_salt)
            )
            if found is not None:
                prepared.earlier_model = found[0]
                return found[1]
        if last is not None:
            return last
        if not request.continues:  # it has few messages by which to recognise it
            return self._last_prompts.alike(model, session, current)
        # a part that tells conversations apart may have changed; a fork begins in its origin
        earlier: SessionPrompt | None = None
        for name in filter(None, (session, request.hints.forked_from)):
            earlier = earlier or self._last_prompts.similar(model, name, current)
        return earlier

    async def _find(
        self,
        prepared: PreparedRequest,
        encoded: EncodedPrompt | None,
        session: str,
        current: SessionPrompt,
    ) -> None:
        """Query the other frontends for the earlier prompt, and compare.

        One of the same conversation is better than a similar one, which this frontend may have.
        """
        model = prepared.model.card.name
        try:
            found = await self._last_prompts.find_elsewhere(
                model, session, current.conversation, current.request
            )
            if found is None and prepared.comparing and current.parts is not None:
                found = await self._last_prompts.find_elsewhere(
                    model, session, current.conversation, current.request, current.parts
                )
        finally:
            prepared.comparing = False
        if found is not None:
            change = _compare(prepared, encoded, found).change
            self._last_prompts.note_change(model, session, current.request, change)


def _parts(
    request: GenerateRequest, current: SessionPrompt, last: SessionPrompt | None
) -> PromptParts | None:
    """The parts of the prompt, most of which are those of the last one if it begins with that."""
    if last is not None and last.parts is not None and current.tokens.startswith(last.tokens):
        known = continued(request, last.parts)
        if known is not None:
            return known
    return fingerprints(request)


def _is_earlier(request: GenerateRequest, earlier: SessionPrompt | None) -> bool:
    """True if no other frontend can have a better one: it is named or of the same conversation."""
    if earlier is None:
        return False
    same = earlier.conversation == request.hints.conversation
    return same or earlier.request == request.previous_message


def _compare(
    prepared: PreparedRequest, encoded: EncodedPrompt | None, earlier: SessionPrompt
) -> PromptComparison:
    """Compare the prompt, and note the comparison in the request."""
    prompt, decode = prepared.prompts[0], _decoder(prepared)
    compared = ComparedPrompt(
        prepared.request, prepared.parts, encoded, decode, _answers(prepared, decode)
    )
    prepared.comparison = compare(
        prompt.tokens, prompt.salt, earlier, partial(compared.difference, earlier), decode
    )
    return prepared.comparison


def _answers(prepared: PreparedRequest, decode: Callable[[bytes], str]) -> AnswerForm:
    dialect, tools = prepared.model.dialect, prepared.request.tools

    def tail(earlier: SessionPrompt) -> str:
        return decode(earlier.tokens[-TAIL_TOKENS * TOKEN_BYTES :])

    def generated(earlier: SessionPrompt) -> Sequence[Block]:
        parser, transcript = dialect.grammar.parser(tools, tail(earlier), eager=False), Transcript()
        for event in chain(parser.feed(decode(earlier.output)), parser.finish()):
            transcript.add(event)
        return transcript.blocks(in_order=True)

    return AnswerForm(
        generated,
        lambda earlier: dialect.grammar.begins_thinking(tail(earlier)),
        dialect.template.drops_thinking(prepared.request),
    )


def _decoder(prepared: PreparedRequest) -> Callable[[bytes], str]:
    detokenizers = prepared.model.dialect.detokenizers

    def decode(tokens: bytes) -> str:
        detokenizer = detokenizers.create()
        return detokenizer.feed(array("I", tokens).tolist()) + detokenizer.finish()

    return decode


def _session(request: GenerateRequest) -> str | None:
    """The session's name; that of its first message for one that the caller does not name.

    So the turns of a conversation are compared even if its system prompt or its tools change.
    """
    session, tenant = request.hints.session, request.cache_salt
    if session is not None and not is_inferred(session):
        return session
    first = request.hints.conversation & MASK
    return inferred(tenant, f"conversation {first:x}") if request.messages else None


def _report_moving(
    prepared: PreparedRequest, compared: PromptComparison, reported: LogOnce
) -> None:
    change, model = compared.change, prepared.model.card.name
    if change is None or change.turns < MOVING_TURNS:
        return
    prompt: PromptTokens = prepared.prompts[0]
    again = min(compared.length, len(prompt.tokens) // TOKEN_BYTES) - compared.common
    metrics.moving_prompts.labels(model, change.part).inc()
    session = prepared.request.hints.session or ""
    name = own_name(session).encode("unicode_escape").decode()
    if change.turns == MOVING_TURNS and reported.first(session):
        log.warning(
            "session %s changes its prompt every turn, in %s from character %d on (token %d):"
            " %d tokens of request %s are computed again",
            *(name, described(change), change.offset, change.token),
            *(again, prepared.request.id),
        )
