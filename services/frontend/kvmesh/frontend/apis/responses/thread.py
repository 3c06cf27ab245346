"""The conversation that a response continues, and its own turn. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from kvmesh.frontend.apis.base import StoredTurn
from kvmesh.frontend.apis.content.tagged import Reading
from kvmesh.frontend.apis.responses.body import (
    ConversationParam,
    ResponsesBody,
    input_items,
    instructions,
    storable_items,
    to_messages,
)
from kvmesh.frontend.apis.responses.conversations import listed_items
from kvmesh.frontend.apis.responses.items import RESPONSE_PREFIX
from kvmesh.frontend.apis.responses.references import (
    Outputs,
    References,
    referenced_responses,
    resolve,
)
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import GenerateRequest, Message
from kvmesh.frontend.turn_memo import TurnMemo


class _Output(msgspec.Struct):
    output: list[Raw]


class ResponsesThread:
    """The stored conversation that a response continues or refers to, and its own turn.

    `correct` changes a field of the answer, to say that it was not stored.
    """

    kept: "KeptConversation | None" = None
    keeps = False

    def __init__(
        self,
        request: GenerateRequest,
        body: ResponsesBody,
        turn: TurnBody,
        correct: Callable[[str, object], None],
    ) -> None:
        self._known = turn.items  # those before the items of `body`, none of which is a reference
        self._request = request
        self._body = body
        self._correct = correct
        self.previous = body.previous_response_id
        named = body.conversation
        self.conversation = named.id if isinstance(named, ConversationParam) else named
        self.store = body.store is not False
        self._before: list[Raw] = []  # the items that it continues
        self._resolved: list[Raw] | None = None

    def _items(self) -> list[Raw]:
        return [*self._known(), *input_items(self._body)]

    @property
    def _own(self) -> list[Raw]:
        """The items of the body, without references that were resolved."""
        return self._items() if self._resolved is None else self._resolved

    @property
    def whole(self) -> list[Raw]:
        """All items up to the answer."""
        return [*self._before, *self._own]

    def referenced(self, turns: list[StoredTurn]) -> References:
        """Responses whose items the input or an earlier turn refers to."""
        items = input_items(self._body) if isinstance(self._body.input, list) else []
        return referenced_responses([*_items(turns), *items])

    def extend(self, turns: list[StoredTurn], outputs: Outputs) -> None:
        """Insert the messages of earlier turns before this request's input; resolve references."""
        reading = Reading()
        earlier = self._earlier(turns, outputs, reading)
        own = resolve(self._items(), outputs, "input")
        self._show([*earlier, *to_messages(own, reading)])
        self._before, self._resolved = resolve(_items(turns), outputs, None), own
        self._request.body_bytes += reading.sealed.bytes

    def _earlier(
        self, turns: list[StoredTurn], outputs: Outputs, reading: Reading
    ) -> Sequence[Message]:
        return to_messages(resolve(_items(turns), outputs, "previous_response_id"), reading)

    def _show(self, messages: list[Message]) -> None:
        self._request.messages = [*instructions(self._body), *messages]

    def turn(self, response: bytes) -> StoredTurn:
        """The turn to store, with the whole `response` object."""
        output = output_of(response)
        return StoredTurn(
            id=self._request.id,
            previous=self.previous,
            input=storable_items(self._items()),
            output=output,
            response=Raw(response),
            compacted=compacts(output),
            conversation=self.conversation or "",
        )

    def added(self, response: bytes) -> list[Raw]:
        """The items of this turn, to add to the conversation."""
        token = self._request.id.removeprefix(RESPONSE_PREFIX)
        return [*listed_items(self._own, token, "input"), *output_of(response)]

    def mark_not_added(self) -> None:
        self._correct("conversation", None)

    def mark_unstored(self) -> None:
        self.store = False
        self._correct("store", False)

    def keep(self, response: bytes) -> None:
        """Keep nothing: the conversation is that of one request."""


class KeptConversation(NamedTuple):
    """A conversation up to a response, as a connection keeps it.

    `stored` is the last of its responses that is stored, if one is; `items` are those behind it.
    `messages` are those of the whole conversation without instructions, made of `size` bytes. Only
    `tenant` may continue it.
    """

    tenant: str
    stored: str | None
    items: Sequence[Raw]
    messages: Sequence[Message]
    memo: TurnMemo
    size: int


Keep = Callable[[str, KeptConversation], None]


class KeptThread(ResponsesThread):
    """A response over a connection that keeps its conversation.

    It continues `kept`, if the connection has what precedes it; `keep` gets it with its id at its
    end.
    """

    keeps = True

    def __init__(
        self,
        request: GenerateRequest,
        body: ResponsesBody,
        turn: TurnBody,
        correct: Callable[[str, object], None],
        kept: KeptConversation | None,
        keep: Keep,
    ) -> None:
        super().__init__(request, body, turn, correct)
        self.kept = kept
        self._keep = keep
        self.keeps = self.conversation is None
        self._refers = False
        self._size = kept.size if kept is not None else 0
        self._memo = request.memo = kept.memo if kept is not None else TurnMemo()
        self._messages = request.messages[len(instructions(body)) :]
        self._show(self._messages)

    def referenced(self, turns: list[StoredTurn]) -> References:
        found = super().referenced(turns)
        self._refers = bool(found)
        return found

    def extend(self, turns: list[StoredTurn], outputs: Outputs) -> None:
        if self.kept is not None and not self._refers:
            self._show([*self.kept.messages, *self._messages])
            return
        self._size += sum(map(len, _items(turns)))
        super().extend(turns, outputs)

    def _earlier(
        self, turns: list[StoredTurn], outputs: Outputs, reading: Reading
    ) -> Sequence[Message]:
        if self.kept is not None:
            return self.kept.messages
        return super()._earlier(turns, outputs, reading)

    def _show(self, messages: list[Message]) -> None:
        self._messages = messages
        system = [self._memo.same("instructions", each) for each in instructions(self._body)]
        self._request.messages = [*system, *messages]

    def turn(self, response: bytes) -> StoredTurn:
        turn = super().turn(response)
        if self.kept is not None:
            turn.previous = self.kept.stored
            turn.input = [*storable_items(list(self.kept.items)), *turn.input]
        return turn

    def keep(self, response: bytes) -> None:
        """Keep the conversation up to this `response`, for the connection's next one."""
        own, output = self._items(), output_of(response)
        stored: str | None = self._request.id
        items: list[Raw] = []
        if not self.store:
            stored = self.kept.stored if self.kept is not None else self.previous
            items = [*(self.kept.items if self.kept is not None else ()), *own, *output]
        messages = [*self._messages, *to_messages(output, Reading())]
        size = self._size + sum(map(len, own)) + sum(map(len, output))
        request = self._request
        memo = request.memo
        if compacts(output):  # the summary, with which it begins, stands for the rest
            messages, size, memo = to_messages(output, Reading()), sum(map(len, output)), TurnMemo()
            stored, items = (stored, items) if self.store else (None, output)
        kept_now = KeptConversation(request.cache_salt, stored, items, messages, memo, size)
        self._keep(request.id, kept_now)


def output_of(response: bytes) -> list[Raw]:
    """The output items of a response object."""
    return msgspec.json.decode(response, type=_Output).output


def compacts(output: list[Raw]) -> bool:
    """True if an answer's output begins with a summary."""
    return bool(output) and bytes(output[0]).startswith(b'{"type":"compaction"')


def _items(turns: list[StoredTurn]) -> list[Raw]:
    return [item for turn in turns for item in (*turn.input, *turn.output)]
