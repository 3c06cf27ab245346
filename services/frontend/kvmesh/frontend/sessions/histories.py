"""The history of each conversation: compares its prompts, and finds those that always change."""

import logging
import time
from array import array
from collections.abc import Callable

from msgspec.structs import replace

from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import SessionPrompt, owner
from kvmesh.frontend import metrics
from kvmesh.frontend.cache_account.comparison import (
    PromptComparison,
    common_tokens,
    compare,
    described,
)
from kvmesh.frontend.cache_account.prompt_parts import locate
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.namespaces import SEPARATOR, inferred
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, PromptTokens
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
MOVING_TURNS = 3  # consecutive turns that change in one part of the prompt
MAX_TASKS = 256


class Histories:
    """Call `begin` once a request is prepared, and `end` at its end.

    The session of a request that names none is its conversation, by the first user message.
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
        conversation = request.hints.conversation
        session = _session(request, conversation)
        if session is None:
            return None
        earlier = self._earlier(prepared, model, session, conversation)
        current = SessionPrompt(
            prepared.prompts[0].tokens,
            prepared.adapter,
            prepared.prompts[0].salt,
            request.id,
            time.time(),
            conversation,
        )
        encoded, prepared.encoded = prepared.encoded, None
        if earlier is not None:
            current = replace(current, change=_compare(prepared, encoded, earlier).change)
        elif request.turn and len(self._tasks) < MAX_TASKS:
            prepared.comparing = True
            self._tasks.start(self._find(prepared, encoded, session, conversation))
        self._last_prompts.store(model, session, current)
        return session

    def end(self, prepared: PreparedRequest, session: str, stream: TokenStream) -> None:
        """Add the output to the stored prompt, and report a prompt that moves every turn."""
        request = prepared.request
        output = array("I", stream.tokens).tobytes() if request.n == 1 else b""
        self._last_prompts.complete(prepared.model.card.name, session, request.id, output)
        compared = prepared.comparison
        if compared is not None and compared.change is not None:
            _report_moving(prepared, compared, session, self._reported)

    async def close(self) -> None:
        await self._tasks.close()

    def _earlier(
        self, prepared: PreparedRequest, model: str, session: str, conversation: int
    ) -> SessionPrompt | None:
        """The earlier prompt that this frontend has; the one that the request names, if any."""
        request = prepared.request
        if request.previous_message:
            found = self._last_prompts.of_request(
                request.previous_message, owner(request.cache_salt)
            )
            if found is not None:
                prepared.earlier_model = found[0]
                return found[1]
        earlier = self._last_prompts.earlier(model, session, conversation)
        if earlier is None and request.turn:
            # the first message itself may change, but then most of the prompt does not
            newest, tokens = self._last_prompts.newest(model, session), prepared.prompts[0].tokens
            if newest is not None and _is_similar(tokens, newest.tokens):
                return newest
        return earlier

    async def _find(
        self,
        prepared: PreparedRequest,
        encoded: EncodedPrompt | None,
        session: str,
        conversation: int,
    ) -> None:
        """Query the other frontends for the earlier prompt, and compare."""
        model = prepared.model.card.name
        try:
            found = await self._last_prompts.find_elsewhere(
                model, session, conversation, prepared.request.id
            )
        finally:
            prepared.comparing = False
        if found is not None:
            change = _compare(prepared, encoded, found).change
            self._last_prompts.note_change(model, session, prepared.request.id, change)


def _compare(
    prepared: PreparedRequest, encoded: EncodedPrompt | None, earlier: SessionPrompt
) -> PromptComparison:
    """Compare the prompt, and note the comparison in the request."""
    prompt, decode = prepared.prompts[0], _decoder(prepared)
    prepared.comparison = compare(
        prompt.tokens,
        prompt.salt,
        earlier,
        lambda token: locate(prepared.request, encoded, decode, token),
        decode,
    )
    return prepared.comparison


def _is_similar(one: bytes, other: bytes) -> bool:
    """True if two packed prompts share at least half of the shorter one."""
    return 2 * TOKEN_BYTES * common_tokens(one, other) >= min(len(one), len(other))


def _decoder(prepared: PreparedRequest) -> Callable[[bytes], str]:
    detokenizers = prepared.model.dialect.detokenizers

    def decode(tokens: bytes) -> str:
        detokenizer = detokenizers.create()
        return detokenizer.feed(array("I", tokens).tolist()) + detokenizer.finish()

    return decode


def _session(request: GenerateRequest, conversation: int) -> str | None:
    """The session's name; that of its conversation for one that the caller does not name."""
    session, tenant = request.hints.session, request.cache_salt
    if session is not None and SEPARATOR * 2 not in session:
        return session
    return inferred(tenant, f"conversation {conversation:x}") if request.messages else None


def _report_moving(
    prepared: PreparedRequest, compared: PromptComparison, session: str, reported: LogOnce
) -> None:
    change, model = compared.change, prepared.model.card.name
    if change is None or change.turns < MOVING_TURNS:
        return
    prompt: PromptTokens = prepared.prompts[0]
    again = min(compared.length, len(prompt.tokens) // TOKEN_BYTES) - compared.common
    metrics.moving_prompts.labels(model, change.part).inc()
    name = session.rpartition(SEPARATOR)[2].encode("unicode_escape").decode()
    if change.turns == MOVING_TURNS and reported.first(session):
        log.warning(
            "session %s changes its prompt every turn, in %s from character %d on (token %d):"
            " %d tokens of request %s are computed again",
            *(name, described(change), change.offset, change.token),
            *(again, prepared.request.id),
        )
