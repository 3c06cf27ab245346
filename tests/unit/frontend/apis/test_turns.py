"""A body that continues an earlier one is read as if there were none."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace
from support.stamp import STAMP

from kvmesh.frontend.apis.base import Api
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.turns.bodies import MIN_BYTES, WINDOW, Turns
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.turn_memo import NO_MEMO

APIS: dict[str, Api] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}
FILL = "lorem ipsum " * (MIN_BYTES // 12 + 100)
TOOL = {"name": "read", "description": "d", "parameters": {"type": "object"}}
PIECES = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b" ", b"\n", b"\\u0041", b"\\ud83d", b"\xff"]
PIECES += [
    "é🦀".encode(),
    b'"role"',
    b'"messages":[],',
    b'"input":[],',
    b"1.0",
    b"null",
    b",]",
    b"",
]

texts = st.sampled_from(["", "a", "x\ny", 'q"uo\\te', "naïve 🦀", "[1,2],{", FILL[:700]])
whites = st.sampled_from(["", " ", "\n", "\t \r\n"])


def item(api: str, draw: Any, number: int) -> dict[str, Any]:
    """A message of a conversation, of any kind that the API has."""
    text, kind = draw(texts), draw(st.integers(0, 5))
    user = number % 2 == 0
    if api == "responses":
        if kind == 0:
            return {
                "type": "function_call",
                "call_id": f"c{number}",
                "name": "f",
                "arguments": "{}",
            }
        if kind == 1:
            return {"type": "function_call_output", "call_id": f"c{number - 1}", "output": text}
        part = {"type": "input_text" if user else "output_text", "text": text}
        return {"role": "user" if user else "assistant", "content": [part] if kind == 2 else text}
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}, {"type": "text", "text": "end"}]
    message: dict[str, Any] = {"role": "user" if user else "assistant", "content": text}
    if kind == 0:
        message["content"] = parts
    if kind == 1 and api == "messages":
        parts[-1]["cache_control"] = {"type": "ephemeral"}
        message["content"] = parts
    if kind == 2 and not user and api == "chat":
        call = {"id": f"c{number}", "function": {"name": "f", "arguments": '{"a": 1}'}}
        message["tool_calls"] = [call]
        message["reasoning_content"] = text
    if kind == 2 and not user and api == "messages":
        use = {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"a": [1, text]}}
        message["content"] = [{"type": "thinking", "thinking": text, "signature": "s"}, use]
    if kind == 3 and user and number and api == "chat":
        message = {"role": "tool", "tool_call_id": f"c{number - 1}", "content": text}
    if kind == 3 and user and number and api == "messages":
        result = {"type": "tool_result", "tool_use_id": f"t{number - 1}", "content": parts}
        message["content"] = [result]
    if kind == 4 and draw(st.booleans()):
        message["name"] = "bob"
    return message


def encoded(api: str, items: list[dict[str, Any]], draw: Any) -> bytes:
    """A body with its fields in any order, some of them twice, and any white space."""
    field = "input" if api == "responses" else "messages"
    tools: list[Any] = [TOOL | {"input_schema": {}}]
    if api == "chat":
        tools = [{"type": "function", "function": TOOL}]
    if api == "responses":
        tools = [TOOL | {"type": "function"}]
    fields: list[tuple[str, Any]] = [("model", "m"), (field, items), ("tools", tools)]
    fields += [("stream", draw(st.booleans()))] if draw(st.booleans()) else []
    fields += [("system", draw(texts))] if api == "messages" else []
    fields += [("instructions", draw(texts))] if api == "responses" else []
    if draw(st.integers(0, 9)) == 0:
        fields.append((field, items[:1] if draw(st.booleans()) else [{"role": 5}]))
    if draw(st.integers(0, 9)) == 0:
        fields.append(("nvext", {"extra_fields": ["ignored"], "unknown": 1}))
    if draw(st.integers(0, 3)) == 0:
        fields = draw(st.permutations(fields))
    space = draw(whites)
    separators = f"{space},{space}", f"{space}:{space}"
    written = (f"{json.dumps(k)}:{json.dumps(v, separators=separators)}" for k, v in fields)
    return f"{{{f',{space}'.join(written)}}}".encode()


def outcome(api: str, turns: Turns | None, body: bytes, tenant: str = "") -> dict[str, Any] | str:
    """The request, or its error, in a form that compares; the turn is kept."""
    turn = turns.open(tenant, api, body) if turns is not None else None
    try:
        request = APIS[api].parse(body, {}, STAMP, turn).request
    except ApiError as error:
        return f"{error.kind} {error.message} {getattr(error, 'param', None)} {error.code}"
    request.cache_salt = tenant
    if turn is not None:
        turn.keep(request, tenant)
    return fields_of(request)


def fields_of(request: GenerateRequest) -> dict[str, Any]:
    return asdict(replace(request, memo=NO_MEMO))


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_turns_read_as_whole_bodies_do(api: str, data: st.DataObject) -> None:
    draw, turns = data.draw, Turns(1 << 24, "secret")
    items = [{"role": "user", "content": FILL}]
    for _ in range(5):
        items += [item(api, draw, len(items) + at) for at in range(draw(st.integers(1, 4)))]
        if draw(st.integers(0, 4)) == 0:
            del items[draw(st.integers(1, len(items) - 1)) :]
        body = encoded(api, items, draw)
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(body)))
            body = body[:at] + draw(st.sampled_from(PIECES)) + body[at + draw(st.integers(0, 3)) :]
        if is_utf8(body):
            assert outcome(api, turns, body) == outcome(api, None, body)
        else:  # it is refused before it is read
            assert not is_utf8(turns.open("", api, body).rest)


def is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("api", APIS)
def test_a_turn_decodes_only_what_it_adds(api: str) -> None:
    turns = Turns(1 << 24, "secret")
    first, second = sent(api, "one"), sent(api, "one", "two", "three")
    outcome(api, turns, first)
    turn = turns.open("", api, second)
    assert turn.count == 2
    assert len(turn.rest) < 400
    request = APIS[api].parse(second, {}, STAMP, turn).request
    again = APIS[api].parse(second, {}, STAMP, turns.open("", api, second)).request
    assert [*map(id, request.messages[:2])] == [*map(id, again.messages[:2])]
    assert fields_of(request) == outcome(api, None, second)


def test_tenants_and_apis_share_no_body() -> None:
    turns = Turns(1 << 24, "secret")
    outcome("chat", turns, sent("chat", "one"), "a")
    more = sent("chat", "one", "two")
    assert turns.open("a", "chat", more).count
    assert not turns.open("b", "chat", more).count
    assert not turns.open("a/part", "chat", more).count
    assert not turns.open("a", "messages", more).count


def test_a_tenant_named_in_the_body_leaves_nothing() -> None:
    turns = Turns(1 << 24, "secret")
    body = sent("chat", "one")
    turn = turns.open("", "chat", body)
    request = Chat().parse(body, {}, STAMP, turn).request
    request.cache_salt = "tag of the tenant in the body"
    turn.keep(request, "")
    assert turns.size == 0
    assert request.memo is NO_MEMO


def test_bodies_are_bounded() -> None:
    turns = Turns(12 * len(sent("chat", "one")), "secret")
    for tenant in "abcdefgh":
        outcome("chat", turns, sent("chat", tenant), tenant)
    assert 0 < turns.size <= 12 * len(sent("chat", "one"))
    assert not turns.open("a", "chat", sent("chat", "a", "b")).count
    assert turns.open("h", "chat", sent("chat", "h", "b")).count


def test_a_body_takes_the_place_of_the_one_that_it_continues() -> None:
    turns, texts_so_far = Turns(1 << 24, "secret"), ["one"]
    for number in range(40):
        texts_so_far += [f"{number}", FILL[: WINDOW * number]]
        outcome("chat", turns, sent("chat", *texts_so_far))
    assert turns.size < 5 * len(sent("chat", *texts_so_far)) + 1000 * len(texts_so_far)


def test_no_text_of_a_client_is_taken_for_the_marker() -> None:
    """The array that the marker must begin is the one that counts, wherever the name occurs."""
    turns = Turns(1 << 24, "secret")
    items = [{"role": "user", "content": FILL}, {"role": "user", "content": "x"}]
    listed = json.dumps(items)
    decoy = f'{{"model":"m","metadata":{{"messages":{listed}}},"messages":{listed[:-1]},%s}}'
    for added in ('{"role":"user","content":"y"}]', '{"role":"user","content":"z"}],"messages":[]'):
        body = (decoy % added).encode()
        assert outcome("chat", turns, body) == outcome("chat", None, body)


def sent(api: str, *contents: str) -> bytes:
    messages = [{"role": "user", "content": FILL}]
    roles = ["assistant", "user"] * len(contents)
    messages += [{"role": r, "content": t} for r, t in zip(roles, contents, strict=False)]
    field = "input" if api == "responses" else "messages"
    return json.dumps({"model": "m", field: messages, "temperature": 0.5}).encode()
