"""Every field of the contents that the vendors' SDKs can send changes the request or is listed."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
from anthropic.types import beta
from openai.types import chat, responses
from support.stamp import STAMP
from typing_extensions import is_typeddict
from unit.frontend.apis.answers import body
from unit.frontend.apis.prompts import APIS

DEPTH = 6  # of generated values
# Ids and states of finished items, which no model reads, and opaque texts of other servers.
WITHOUT_MEANING = {"id", "status", "caller", "encrypted_content", "acknowledged_safety_checks"}
WITHOUT_MEANING |= {"max_output_length", "approval_request_id"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
_numbers = count()
Sent = dict[str, Any]


def fields_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def is_required(hint: Any) -> bool:
    return get_origin(hint) is Required


def sample(hint: Any, depth: int = 0) -> Any:
    """A value of a type; a dict of a TypedDict has its required fields."""
    origin, args = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        inner = fields_of(hint).items()
        return {k: sample(v, depth + 1) for k, v in inner if hint.__total__ or is_required(v)}
    if origin in (Required, NotRequired, Annotated):
        return sample(args[0], depth)
    if origin is Literal:
        return args[0]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"a": 1}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return [sample(args[0], depth + 1)] if depth < DEPTH else []
    if args:
        return sample(next(arg for arg in args if arg is not type(None)), depth)
    words = f"words {next(_numbers)}"
    return {int: 7, float: 0.5, bool: True, object: {"a": 1}}.get(hint, words)


def members(union: Any) -> Iterator[Any]:
    """The TypedDicts of a union."""
    if is_typeddict(union):
        yield union
    for part in get_args(union):
        yield from members(part)


def request(api: str, sent: Sent) -> Any:
    full = body(APIS[api], **sent, nvext={"extra_fields": ["ignored"]})
    return APIS[api].parse(full, {}, STAMP).request


def shown(api: str, sent: Sent) -> str:
    """All that the model gets of a body."""
    asked = request(api, sent)
    return repr((asked.messages, asked.tools, asked.template_args))


def in_message(role: str, part: Any) -> Sent:
    content = [{"type": "text", "text": "Hi"}, part]
    return {"messages": [{"role": role, "content": content}, {"role": "user", "content": "go"}]}


PLACES = {
    ("messages", "messages[0].content[1]"): (
        beta.BetaContentBlockParam,
        lambda block: in_message("user", block),
    ),
    ("messages", "tools[0]"): (beta.BetaToolUnionParam, lambda tool: {"tools": [tool]}),
    ("chat", "messages[0].content[1]"): (
        chat.ChatCompletionContentPartParam,
        lambda part: in_message("user", part),
    ),
    ("chat", "messages[0]"): (chat.ChatCompletionMessageParam, lambda m: {"messages": [m]}),
    ("chat", "tools[0]"): (chat.ChatCompletionToolUnionParam, lambda tool: {"tools": [tool]}),
    ("responses", "input[0]"): (responses.ResponseInputItemParam, lambda item: {"input": [item]}),
    ("responses", "tools[0]"): (responses.ToolParam, lambda tool: {"tools": [tool]}),
}
CASES = [
    pytest.param(api, path, kind, make, id=f"{api}-{kind.__name__}")
    for (api, path), (union, make) in PLACES.items()
    for kind in members(union)
]


@pytest.mark.parametrize(("api", "path", "kind", "make"), CASES)
def test_no_field_is_lost_in_silence(api: str, path: str, kind: Any, make: Any) -> None:
    whole = sample(kind)
    if "type" in fields_of(kind):
        whole["type"] = sample(fields_of(kind)["type"])
    if kind is responses.response_input_item_param.FunctionCallOutput:
        whole |= {"call_id": "c", "name": "n", "namespace": "s"}  # the call has the same names
    if path in request(api, make(whole)).ignored:
        return  # all of it is listed
    before = shown(api, make(whole))
    lost = []
    for name, hint in fields_of(kind).items():
        value = GRAMMAR if name == "format" else sample(hint)
        sent = make({**whole, name: value})
        listed = [each for each in request(api, sent).ignored if each.startswith(f"{path}.{name}")]
        if not listed and shown(api, sent) == before and name not in whole:
            lost.append(name)
    assert [name for name in lost if name not in WITHOUT_MEANING] == []
