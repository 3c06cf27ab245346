"""The parser reads all that engines are constrained to write, in every combination."""

import itertools
import json
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonschema
import msgspec
import pytest
from support import apis
from support.stamp import STAMP
from unit.frontend.apis.answers import USAGE, events

from kvmesh.bus.messages import Guided, ModelCard
from kvmesh.frontend.apis.base import AnswerSummary, Api, Ending
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.conversation import (
    AnswerEvent,
    GenerateRequest,
)
from kvmesh.frontend.dialects.families import (
    NAME_SIGNS,
    REASONING_PARSERS,
    TEMPLATE_SIGNS,
)
from kvmesh.frontend.dialects.output import OutputGrammar
from kvmesh.frontend.dialects.preview import merge_deltas
from kvmesh.frontend.dialects.structural_tags import calls_alone, structural_tag
from kvmesh.frontend.preprocess.output_form import OutputForm, output_form
from kvmesh.worker.engines.mock.text.guided import generate

STEP: dict[str, Any] = {
    "$defs": {
        "Step": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "after": {"$ref": "#/$defs/Steps"}},
            "required": ["text"],
            "additionalProperties": False,
        },
        "Steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "maxItems": 1},
    },
    "type": "object",
    "properties": {"step": {"$ref": "#/$defs/Step"}},
    "required": ["step"],
    "additionalProperties": False,
}
PATH: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
PARAMETERS = {"read": PATH, "plan": STEP, "plan2": {**STEP, "title": "Other"}}
SCHEMA: dict[str, Any] = {
    "definitions": {"a/b %": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
    "type": "object",
    "properties": {"list": {"$ref": "#/definitions/a~1b%20%25"}},
    "required": ["list"],
    "additionalProperties": False,
}
FAMILIES = sorted(
    {(tool or "", reasoning or "") for _, tool, reasoning in (*TEMPLATE_SIGNS, *NAME_SIGNS)}
)
PROMPTS = ("opens", "closes", "has none")
CHOICES = ("auto", "required", "named", "allowed", "allowed required", "none")
TEXTS = ("free", "schema", "object")
ENGINES = ("tags", "json", "exempt", "deaf")
NAMES = {"named": {"plan"}, "allowed": {"read", "plan"}, "allowed required": {"read", "plan"}}
VALID = {
    name: jsonschema.Draft202012Validator(schema).is_valid
    for name, schema in {**PARAMETERS, "schema": SCHEMA, "object": {"type": "object"}}.items()
}
CHAT, MESSAGES, RESPONSES = Chat(), Messages(), Responses()
READINGS = {api.name: api for api in apis.APIS}
SHOWN = [("hermes", "qwen3"), ("deepseek_v3", "deepseek_r1"), ("harmony", "harmony")]


class Answer(NamedTuple):
    thinking: str
    text: str
    calls: list[tuple[str, str]]


def body(api: Api, choice: str, text: str, stream: bool) -> dict[str, Any]:
    """A request of an API."""
    sent: dict[str, Any] = {"model": "m", "stream": stream}
    name = choice if choice in ("auto", "required", "none") else ""
    picked = sorted(NAMES.get(choice, ()))
    mode = "auto" if choice == "allowed" else "required"
    if api.name == "chat":
        functions = [{"name": n, "parameters": p} for n, p in PARAMETERS.items()]
        sent["tools"] = [{"type": "function", "function": each} for each in functions]
        sent["messages"] = [{"role": "user", "content": "Hi"}]
        listed: list[Any] = [{"type": "function", "function": {"name": n}} for n in picked]
        several = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
        sent["tool_choice"] = name or (listed[0] if choice == "named" else several)
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        form = {"schema": schema, "object": {"type": "json_object"}}
        return sent | ({"response_format": form[text]} if text in form else {})
    if api.name == "responses":
        sent["tools"] = [
            {"type": "function", "name": n, "parameters": p} for n, p in PARAMETERS.items()
        ]
        listed = [{"type": "function", "name": n} for n in picked]
        several = {"type": "allowed_tools", "mode": mode, "tools": listed}
        sent["tool_choice"] = name or (listed[0] if choice == "named" else several)
        schema = {"type": "json_schema", "name": "s", "schema": SCHEMA}
        form = {"schema": schema, "object": {"type": "json_object"}}
        return sent | {"input": "Hi"} | ({"text": {"format": form[text]}} if text in form else {})
    kinds = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}
    named = {"name": picked[0]} if choice == "named" else {}
    sent["tools"] = [{"name": n, "input_schema": p} for n, p in PARAMETERS.items()]
    sent["tool_choice"] = {"type": kinds[choice], **named}
    schema = {"type": "json_schema", "schema": SCHEMA}
    asked = {"output_config": {"format": schema}} if text == "schema" else {}
    messages = [{"role": "user", "content": "Hi"}]
    return sent | {"max_tokens": 99, "messages": messages, **asked}


def encoded(sent: dict[str, Any]) -> bytes:
    return json.dumps(sent).encode()


def form_of(api: Api, family: tuple[str, str], choice: str, text: str, engine: str) -> OutputForm:
    request = api.parse(encoded(body(api, choice, text, stream=False)), {}, STAMP).request
    return described(request, family, engine)


def described(request: GenerateRequest, family: tuple[str, str], engine: str) -> OutputForm:
    card = ModelCard(
        name="m",
        context=999,
        block_size=16,
        files="",
        structural_tags=engine != "json",
        exempts_thinking=engine == "exempt",
    )
    grammar = OutputGrammar(family[0] or None, family[1] or None)
    model: Any = SimpleNamespace(card=card, dialect=SimpleNamespace(grammar=grammar))
    return output_form(request, model)


def prompt_of(family: tuple[str, str], kind: str) -> str | None:
    """The end of a prompt; None if the family has no such one."""
    reasoning = REASONING_PARSERS.get(family[1])
    if kind == "has none":
        return "assistant\n"
    if reasoning is None:
        return None
    opened = f"assistant\n{reasoning.begin[0]}\n"
    return opened if kind == "opens" else f"{opened}\n{reasoning.end[0]}\n\n"


def written(form: OutputForm, engine: str, rng: Random) -> str:
    """An output as the engine gives it: a deaf one answers in the model's own form."""
    guided, reasoning = form.constraint(), form.grammar.reasoning
    if engine == "deaf":
        begin = reasoning.begin[0] if reasoning is not None else ""
        thought = "" if form.begins_thinking else begin
        head = f"{thought}I plan.{reasoning.end[0]}\n\n" if reasoning is not None else ""
        calls = calls_alone(form.grammar.tool_parser, form.tools, True)
        if calls is None or form.calls == "none":
            return head + '{"list": [7]}'
        tag = msgspec.json.encode(structural_tag(calls)).decode()
        return head + generate(Guided(kind="structural_tag", value=tag), rng)
    head, free = "", form.text is None and form.calls != "required"
    if (engine == "exempt" or free) and reasoning is not None and form.begins_thinking:
        head = f"I plan.{reasoning.end[0]}\n\n"
    return head + ("A word of text." if guided is None else generate(guided, rng))


def pieces(text: str, rng: Random) -> Iterator[str]:
    while text:
        size = rng.randint(1, 12)
        yield text[:size]
        text = text[size:]


def parsed(form: OutputForm, output: str, rng: Random | None = None) -> list[AnswerEvent]:
    """Events of an output in pieces as a stream, or without `rng` as a whole."""
    parser = form.parser(eager=rng is not None)
    found: list[AnswerEvent] = []
    for piece in pieces(output, rng) if rng is not None else (output,):
        found += parser.feed(piece)
    return found + parser.finish()


def answer(found: list[AnswerEvent]) -> Answer:
    merged = merge_deltas(found)
    thinking = "".join(content for kind, _, content in merged if kind == "thinking")
    text = "".join(content for kind, _, content in merged if kind == "text")
    return Answer(
        thinking, text, [(name, content) for kind, name, content in merged if kind == "call"]
    )


def check(got: Answer, form: OutputForm, choice: str, text: str, engine: str, output: str) -> None:
    allowed = set() if choice == "none" else NAMES.get(choice, set(PARAMETERS))
    assert {name for name, _ in got.calls} <= allowed, output
    deaf = engine == "deaf"
    if form.calls == "required" and not deaf:
        assert got.calls, output
        assert not got.text.strip(), output
        for name, arguments in got.calls:
            assert VALID[name](json.loads(arguments)), output
    elif text != "free" and not deaf:
        assert bool(got.calls) != bool(got.text.strip()), output
        if got.text.strip():
            assert VALID[text](json.loads(got.text)), output
    elif not deaf:
        assert got.text
    elif not got.calls and form.calls == "optional" and choice == "auto":
        assert "list" in got.text, output
    for mark in ("tool_call", "<think>", "</think>"):
        assert mark not in got.text, output


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
def test_what_the_constraint_allows_the_parser_reads(family: tuple[str, str], engine: str) -> None:
    tried = 0
    for choice in CHOICES:
        for text in TEXTS:
            form = form_of(CHAT, family, choice, text, engine)
            for kind in PROMPTS:
                prompt = prompt_of(family, kind)
                if prompt is None:
                    continue
                after = form.after(prompt, None)
                rng = Random(f"{choice}{text}{kind}")
                output = written(after, engine, rng)
                whole = answer(parsed(after, output))
                check(whole, after, choice, text, engine, output)
                assert answer(parsed(after, output, rng)) == whole, output
                tried += 1
    assert tried >= len(CHOICES) * len(TEXTS)


def rendered(api: Api, sent: dict[str, Any], found: list[AnswerEvent]) -> Answer:
    """The content that a client reads in a stream or a whole response."""
    renderer, reading = api.parse(encoded(sent), {}, STAMP).renderer, READINGS[api.name]
    frames = renderer.begin() + renderer.started(lambda: USAGE)
    frames += b"".join(renderer.events(0, [event], []) for event in found)
    frames += renderer.end(0, Ending("stop", None))
    if sent["stream"]:
        frames += renderer.done(AnswerSummary(USAGE))
        content = reading.streamed([event for event in events(frames) if event != "[DONE]"])
    else:
        content = reading.whole(json.loads(renderer.whole(AnswerSummary(USAGE))))
    calls = [(name, json.dumps(arguments)) for name, arguments in content.decode_calls().calls]
    return Answer(content.thinking, content.text, calls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api.name)
@pytest.mark.parametrize("family", SHOWN, ids="-".join)
def test_every_api_asks_for_and_shows_the_form(
    family: tuple[str, str], api: Api, stream: bool
) -> None:
    for choice, text, kind, engine in itertools.product(CHOICES, TEXTS, PROMPTS, ENGINES):
        prompt = prompt_of(family, kind)
        if prompt is None or (api is MESSAGES and ("allowed" in choice or text == "object")):
            continue
        sent = body(api, choice, text, stream)
        request = api.parse(encoded(sent), {}, STAMP).request
        form = described(request, family, engine).after(prompt, request.thinking)
        rng = Random(f"{choice}{text}{kind}")
        output = written(form, engine, rng)
        got = rendered(api, sent, parsed(form, output, rng if stream else None))
        check(got, form, choice, text, engine, output)


# Schemas by what their values may be; some tell it by no `type` of their own.
NUMBERS = {"type": "array", "items": {"type": "integer"}}
ROOTS: dict[str, dict[str, Any]] = {
    "anything": {},
    "numbers": NUMBERS,
    "flags": {"type": "array", "items": {"enum": [True, False, None, -1]}, "minItems": 1},
    "string": {"type": "string"},
    "number": {"type": "number"},
    "enum": {"enum": ["a", "b"]},
    "const": {"const": "yes"},
    "option": {"type": ["object", "null"], "additionalProperties": False},
    "either": {"anyOf": [PATH, {"type": "string"}]},
    "either or any": {"anyOf": [PATH, {}]},
    "referred string": {"$defs": {"S": {"type": "string"}}, "$ref": "#/$defs/S"},
    "referred numbers": {"$defs": {"N": NUMBERS}, "$ref": "#/$defs/N"},
    "referred object": {"definitions": {"P": PATH}, "$ref": "#/definitions/P"},
    "all of": {"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": PATH}},
    "without a type": {"properties": PATH["properties"], "required": ["path"]},
}


@pytest.mark.parametrize("engine", ["tags", "json", "exempt"])
@pytest.mark.parametrize("root", ROOTS)
def test_a_text_of_every_type_is_read(root: str, engine: str) -> None:
    """Also one that could be the beginning of thinking."""
    valid = jsonschema.Draft202012Validator(ROOTS[root]).is_valid
    for family in SHOWN:
        sent = body(CHAT, "auto", "free", stream=False)
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": ROOTS[root]}}
        shown: list[list[Any]] = [[], sent["tools"]]
        for tools in shown:
            asked = {**sent, "tools": tools, "response_format": form}
            request = CHAT.parse(encoded(asked), {}, STAMP).request
            made = described(request, family, engine)
            for kind, seed in itertools.product(PROMPTS, (1, 5, 6)):  # 5, 6: at once
                prompt = prompt_of(family, kind)
                if prompt is None:
                    continue
                after, rng = made.after(prompt, None), Random(seed)
                output = written(after, engine, rng)
                whole = answer(parsed(after, output))
                assert whole.calls or valid(json.loads(whole.text)), (family, kind, output)
                assert answer(parsed(after, output, rng)) == whole, output
