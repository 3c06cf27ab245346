"""Work and tool events that frontends send and decisions of routers, as visible on the bus."""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise, takewhile

import msgspec
from tokenizers import Tokenizer

from kvmesh.bus.client import Bus, BusOptions, RawMessage
from kvmesh.bus.messages import Decision, MessageDecoder, Outcome, StepOutput, ToolEvent, Work
from kvmesh.demo import model_dir
from support.wait import eventually


class Tap:
    """Work and tool events of all frontends and decisions of all routers, in order."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.decisions: list[Decision] = []
        self.outcomes: list[Outcome] = []
        self.tools: list[ToolEvent] = []
        self.generated: dict[str, list[int]] = {}
        self._names: dict[tuple[str, str], str] = {}  # of requests, by their names in chunks
        self._tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))

    @asynccontextmanager
    async def listening(self, options: BusOptions) -> AsyncIterator["Tap"]:
        bus = await Bus.connect(options, "tap")
        work, steps = MessageDecoder(Work), MessageDecoder(StepOutput)
        route = MessageDecoder(Decision | Outcome)

        def on_work(message: Work) -> None:
            self._names[bus.subjects.out(message.frontend), message.ref] = message.request
            self.works.append(self._complete(message))

        async def on_route(message: Decision | Outcome) -> None:
            messages = self.decisions if isinstance(message, Decision) else self.outcomes
            messages.append(message)  # type: ignore[arg-type]

        def on_output(message: RawMessage) -> None:
            for chunk in steps.decode(message.data).chunks:
                name = self._names.get((message.subject, chunk.request), chunk.request)
                tokens = self.generated.setdefault(_request(name), [])
                tokens[chunk.offset :] = chunk.tokens

        await bus.subscribe(bus.subjects.expand("work.>"), work, on_work)
        await bus.subscribe_raw(bus.subjects.expand("out.>"), on_output)
        await bus.subscribe(bus.subjects.route_all, route, on_route)
        await bus.subscribe(bus.subjects.tool_all, MessageDecoder(ToolEvent), self.tools.append)
        await bus.flush()
        yield self
        await bus.close()

    def _complete(self, work: Work) -> Work:
        """The work with its complete prompt, if only a delta was sent."""
        if not work.base:
            return work
        base = next(each for each in reversed(self.works) if each.request == work.base)
        tokens = base.tokens[: 4 * work.shared] + work.tokens
        return msgspec.structs.replace(work, tokens=tokens, base="", shared=0)

    async def outcome(self, work: Work) -> Outcome:
        """The outcome of a request, once known."""
        return await self.outcome_of(work.request)

    async def outcome_of(self, request: str) -> Outcome:
        """The outcome of a request, by its id or that of one of its attempts."""
        wanted = _request(request)
        found = await eventually(
            lambda: [o for o in self.outcomes if _request(o.request) == wanted]
        )
        return found[-1]

    def answer(self, request: str) -> str:
        """The raw text that engines generated for a request, special tokens included."""
        ids = self.generated.get(request, [])
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def tokens(self, work: Work) -> list[int]:
        """The tokens that engines generated for a request so far."""
        return self.generated.get(_request(work.request), [])

    def token(self, text: str) -> int:
        """The id of a token of the demo model."""
        found = self._tokenizer.token_to_id(text)
        assert found is not None
        return int(found)

    def text(self, work: Work) -> str:
        """The prompt as text, special tokens included."""
        return self.decoded(work.tokens)

    def decoded(self, tokens: bytes) -> str:
        """Packed tokens as text, special tokens included."""
        ids = array("I", tokens).tolist()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def since(self, count: int) -> list[Work]:
        """The works after so many."""
        return self.works[count:]

    def of(self, session: str) -> list[Work]:
        return [work for work in self.works if work.session == session]


def _request(attempt: str) -> str:
    """The request of which this is an attempt: the second of r is r.1, for its worker r.1#NAME."""
    return attempt.partition("#")[0].partition(".")[0]


def shared(before: Work, after: Work) -> int:
    """Length of the common prefix of two prompts, in tokens."""
    pairs = zip(array("I", before.tokens), array("I", after.tokens), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def assert_grows(works: list[Work]) -> None:
    """Assert that each prompt is a token prefix of the next one."""
    assert len(works) > 1
    for before, after in pairwise(works):
        assert len(after.tokens) > len(before.tokens)
        assert after.tokens.startswith(before.tokens), f"turn {after.turn} changes an earlier token"
