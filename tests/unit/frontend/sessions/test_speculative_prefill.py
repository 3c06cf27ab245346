"""Speculative prefill: its prediction of the next prompt, and its table of speculations."""

import asyncio
import json
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.stamp import STAMP
from unit.frontend.dialects.recorded import TEMPLATES

from kvmesh.bus.messages import ModelCard
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import AnswerSummary, Api, Ending, Usage
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.transcript import Transcript
from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor
from kvmesh.frontend.sessions.hooks import SessionHooks, successor
from kvmesh.frontend.sessions.speculation_gate import (
    MIN_TRIALS,
    FollowUp,
    FollowUpFamily,
    SpeculationGate,
)
from kvmesh.frontend.sessions.speculations import (
    MAX_OPEN,
    MAX_PER_BASE,
    Speculation,
    SpeculativePrefills,
    common_blocks,
)
from kvmesh.hashing import block_hashes

FILES = {file.name: file.read_bytes() for file in model_dir().iterdir()}
FOLLOW_UP = FollowUp(FollowUpFamily("m", "", True), "user")
ASK = {"role": "user", "content": "Read the file, please."}
SPOKEN: list[AnswerEvent] = [TextDelta("It says "), TextDelta("nothing at all.\n")]
CALLING: list[AnswerEvent] = [
    ThinkingDelta("The file has to be read.\n"),
    TextDelta("I read it."),
    ToolCallStart("c1", "read"),
    ToolCallDelta('{"path":'),
    ToolCallDelta(' "a/b", "lines": [1, 2]}'),
    ToolCallEnd(),
    ToolCallStart("c2", "read"),
    ToolCallDelta("{}"),
    ToolCallEnd(),
]


def served(name: str) -> ServedModel:
    template = {} if name == "demo" else {"chat_template.jinja": template_of(name)}
    card = ModelCard(name="m", context=1 << 20, block_size=4, files="f")
    return ServedModel(card, Dialect(card, {**FILES, **template}), 0)


def template_of(name: str) -> bytes:
    return (TEMPLATES / f"{name}.jinja").read_bytes()


MODELS = {name: served(name) for name in ("demo", "chatml", "llama3", "mistral", "gemma")}


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", **body}).encode()


def answered(api: Api, body: dict[str, Any], answer: list[AnswerEvent]) -> Any:
    """The whole answer as a client of this API gets it."""
    renderer = api.parse(encode(body), {}, STAMP).renderer
    renderer.events(0, answer, [])
    renderer.end(0, Ending("stop"))
    return json.loads(renderer.whole(AnswerSummary(Usage(1, 0, 0, 1))))


def chat_next(body: dict[str, Any], answer: Any, results: list[str]) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    back = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(calls, results, strict=False)
    ]
    return {**body, "messages": [*body["messages"], message, *(back or [ASK])]}


def messages_next(body: dict[str, Any], answer: Any, results: list[str]) -> dict[str, Any]:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    back = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        for call, text in zip(calls, results, strict=False)
    ]
    reply = {"role": "assistant", "content": answer["content"]}
    after = {"role": "user", "content": back} if back else ASK
    return {**body, "messages": [*body["messages"], reply, after]}


def responses_next(body: dict[str, Any], answer: Any, results: list[str]) -> dict[str, Any]:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    back = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": text}
        for call, text in zip(calls, results, strict=False)
    ]
    return {**body, "input": [*body["input"], *answer["output"], *(back or [ASK])]}


CHAT_TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
APIS: dict[str, tuple[Api, dict[str, Any], Any]] = {
    "chat": (Chat(), {"messages": [ASK], "tools": CHAT_TOOLS}, chat_next),
    "messages": (
        Messages(),
        {
            "system": "Be brief.",
            "messages": [ASK],
            "max_tokens": 99,
            "tools": [{"name": "read", "input_schema": {}}],
        },
        messages_next,
    ),
    "responses": (
        Responses(),
        {"input": [ASK], "tools": [{"type": "function", "name": "read", "parameters": {}}]},
        responses_next,
    ),
}


async def tokens_ahead(model: ServedModel, api: Api, body: Any, answer: Any) -> bytes:
    transcript = Transcript()
    for event in answer:
        transcript.add(event)
    preparer = Preprocessor(1 << 20, TenantNamespaces())
    prepared = await preparer.prepare(api.parse(encode(body), {}, STAMP).request, model, None)
    following = successor(prepared.request, transcript.blocks(api.in_order))
    assert following is not None
    return await preparer.tokens_before(following, model)


@pytest.mark.parametrize("answer", [SPOKEN, CALLING], ids=["spoken", "calling"])
@pytest.mark.parametrize("name", APIS)
@pytest.mark.parametrize("model", MODELS)
def test_the_next_prompt_begins_with_what_was_computed_ahead(
    model: str, name: str, answer: list[AnswerEvent]
) -> None:
    api, body, next_body = APIS[name]
    following = next_body(body, answered(api, body, answer), ["first: x", "second"])
    ahead = asyncio.run(tokens_ahead(MODELS[model], api, body, answer))
    again = api.parse(encode(following), {}, STAMP).request
    real = asyncio.run(
        Preprocessor(1 << 20, TenantNamespaces()).prepare(again, MODELS[model], None)
    ).prompts[0]
    assert real.tokens.startswith(ahead)
    before = api.parse(encode(body), {}, STAMP).request
    prompt = asyncio.run(
        Preprocessor(1 << 20, TenantNamespaces()).prepare(before, MODELS[model], None)
    ).prompts[0]
    if model in ("demo", "chatml"):  # their markers are special tokens of the test's tokenizer
        assert len(ahead) > len(prompt.tokens)


def test_a_client_that_drops_thinking_is_expected_to_do_so_again() -> None:
    api, body, next_body = APIS["chat"]
    quiet: list[AnswerEvent] = [event for event in CALLING if not isinstance(event, ThinkingDelta)]
    second = next_body(body, answered(api, body, quiet), ["x", "y"])
    third = next_body(second, answered(api, second, quiet), ["x", "y"])
    ahead = asyncio.run(tokens_ahead(MODELS["demo"], api, second, CALLING))
    again = api.parse(encode(third), {}, STAMP).request
    real = asyncio.run(
        Preprocessor(1 << 20, TenantNamespaces()).prepare(again, MODELS["demo"], None)
    ).prompts[0]
    assert real.tokens.startswith(ahead)


def test_a_turn_whose_thinking_the_template_drops_is_predicted_from_its_first_answer_on() -> None:
    """The person's next message ends the turn: all its tool results are rendered anew."""
    api, body, next_body = APIS["chat"]
    body = {**body, "chat_template_kwargs": {"preserve_thinking": False}}
    second = next_body(body, answered(api, body, CALLING), ["first: x" * 50, "second" * 50])
    final: list[AnswerEvent] = [ThinkingDelta("That is all.\n"), *SPOKEN]
    message = answered(api, second, final)
    third = next_body(second, message, [])
    model = MODELS["chatml"]

    def tokens(of: Any) -> bytes:
        request = api.parse(encode(of), {}, STAMP).request
        preparer = Preprocessor(1 << 20, TenantNamespaces())
        return asyncio.run(preparer.prepare(request, model, None)).prompts[0].tokens

    ahead = asyncio.run(tokens_ahead(model, api, second, final))
    assert tokens(third).startswith(ahead)
    assert not ahead.startswith(tokens(second))
    assert ahead.startswith(tokens(body))


def test_nothing_is_predicted_from_an_empty_answer_or_for_plain_prompts() -> None:
    request = Chat().parse(encode({"messages": [ASK]}), {}, STAMP).request
    assert successor(request, []) is None
    request.messages = []
    assert successor(request, Transcript().blocks(in_order=True)) is None


# --- what became of it ---


def hashes(*tokens: int) -> bytes:
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return block_hashes(packed, 1, 7)[1]


NOTHING: Any = [None] * 7  # fields that do not matter here


def made(
    sequence: bytes, base: int, expires: float = 9.0, session: str | None = "s"
) -> Speculation:
    return Speculation(
        id=f"{session} {sequence.hex()}",
        tenant="t",
        session=session,
        instance="w",
        model="m",
        base_hash=sequence[(base - 1) * 8 : base * 8],
        base_blocks=base,
        end_hash=sequence[-8:],
        blocks=len(sequence) // 8,
        requested_tokens=3,
        after="r",
        follow_up=FOLLOW_UP,
        expires=expires,
    )


def test_shared_blocks_are_those_before_the_first_difference() -> None:
    assert common_blocks(hashes(1, 2, 3), hashes(1, 2, 4, 5)) == 2
    assert common_blocks(hashes(1), hashes(2)) == 0


def test_a_prompt_finds_its_speculation_once() -> None:
    table = SpeculativePrefills()
    assert not list(table.add(made(hashes(1, 2, 3), 2)))
    assert table.pop("t", "s", hashes(1, 9, 3)) is None
    assert table.pop("t", "s", hashes(1)) is None
    assert table.pop("t", "s", hashes(1, 2, 8, 9)) is not None
    assert table.pop("t", "s", hashes(1, 2, 8, 9)) is None


def test_conversations_with_a_common_prefix_keep_their_speculations_apart() -> None:
    table = SpeculativePrefills()
    one, two = (made(hashes(1, n), 1, session=f"s{n}") for n in (2, 3))
    assert not [*table.add(one), *table.add(two)]
    assert table.pop("t", "new", hashes(1, 4)) is None
    assert table.pop("other", "s3", hashes(1, 3)) is None
    assert table.pop("t", "s3", hashes(1, 3, 5)) is two
    assert table.pop("t", None, hashes(1, 4)) is None
    assert table.pop("t", None, hashes(1, 2, 4)) is one


def test_the_speculations_of_one_prefix_are_bounded() -> None:
    table = SpeculativePrefills()
    many = [made(hashes(1, n), 1, session=f"s{n}") for n in range(2, MAX_PER_BASE + 3)]
    assert [one for each in many for one in table.add(each)] == many[:1]
    assert table.remove(many[-1].id) is many[-1]
    assert table.remove(many[-1].id) is None


def test_a_speculation_fits_a_prompt_that_begins_with_all_of_it() -> None:
    speculation = made(hashes(1, 2, 3), 2)
    assert speculation.fits(hashes(1, 2, 3, 4))
    assert not speculation.fits(hashes(1, 2, 4, 4))
    assert not speculation.fits(hashes(1, 2))


def test_replaced_crowded_out_and_expired_speculations_are_returned() -> None:
    table = SpeculativePrefills(limit=2)
    one, two, three = (made(hashes(n, n), 1, expires=float(n)) for n in (1, 2, 3))
    assert list(table.add(one)) == []
    assert list(table.add(one)) == [one]
    assert list(table.add(two)) == []
    assert list(table.add(three)) == [one]
    assert list(table.expire(2.5)) == [two]
    assert list(table.expire(2.5)) == []


def test_a_tenant_crowds_out_its_own_speculations() -> None:
    table = SpeculativePrefills(limit=4)
    victim = replace(made(hashes(1, 2), 1), tenant="victim", id="victim")
    many = [made(hashes(n, n), 1, session=f"s{n}") for n in range(10)]
    parts = [replace(one, tenant=f"t/part-{one.session}") for one in many]
    assert list(table.add(victim)) == []
    assert [one for each in parts for one in table.add(each)] == parts[:7]
    assert table.pop("victim", None, hashes(1, 2)) is victim


def test_sessions_that_crowd_out_others_do_not_end_speculation() -> None:
    """A tenant with many sessions would otherwise end it for all tenants."""
    gate = SpeculationGate("auto")
    family = FOLLOW_UP.family
    for _ in range(2 * MIN_TRIALS):
        gate.record(FOLLOW_UP, 100, 100)
    nothing = cast(Any, None)
    hooks = SessionHooks(nothing, nothing, nothing, gate, 8192)
    for number in range(MAX_OPEN + 100):
        hooks.open(made(hashes(number, 2), 1, session=f"s{number}"))
    planned = gate.plan(family, False)
    assert planned is not None
    assert planned.reason == "pays"
    for _ in range(100):
        hooks.open(made(hashes(7, 2), 1, session="again"))
    assert gate.plan(family, False) != planned


def test_used_tokens_are_those_found_beyond_the_base() -> None:
    speculation = made(hashes(1, 2), 2)

    def used(cached: int, fits: bool = True) -> int:
        prepared = PreparedRequest(*NOTHING)
        prepared.ahead = speculation.ahead(fits, 1)
        ahead = prepared.computed_ahead(cached)
        return ahead.used if ahead is not None else -1

    assert [used(cached) for cached in (0, 2, 4, 99)] == [0, 0, 2, 3]
    assert used(99, fits=False) == 0
