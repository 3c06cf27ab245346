"""Structural tags: constraints of thinking, calls in a family's own syntax, and the final text.

The format is xgrammar's: a tree of nodes, of which engines follow `tag`, `sequence`, `or`,
`triggered_tags`, `tags_with_separator`, `const_string`, `regex`, `json_schema` and `any_text`.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from msgspec import Struct

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.embedded_schemas import embedded_arguments
from kvmesh.frontend.dialects.grammar import ReasoningGrammar
from kvmesh.frontend.dialects.parsing.coerce import property_kinds
from kvmesh.frontend.dialects.tools import by_model_name, schema

NAME, KEY = "NAME", "KEY"
Node: TypeAlias = dict[str, Any]
ANY_TEXT: Node = {"type": "any_text"}
_NOTHING: Node = {"type": "const_string", "value": ""}
_SPACE: Node = {"type": "regex", "pattern": "[ \\n]{0,4}"}
_HARMONY_THINKING = ReasoningGrammar(("<|channel|>analysis<|message|>",), ("<|end|>",))
_HARMONY_NEXT = "<|start|>assistant"
_HARMONY_FINAL = "<|channel|>final<|message|>"


class CallTag(Struct, frozen=True):
    """The form of a call: `begin`, with NAME for the function's name, arguments, `end`.

    `begin` starts with `trigger`, which models write for nothing else; "" if they may. If
    `numbered` is set, the call's number and that text follow `begin`. `argument` encloses each
    argument, with KEY for its name, where arguments are no JSON. `section` encloses all calls, with
    `separator` between them; `single`: there is one call.
    """

    trigger: str
    begin: str
    end: str
    numbered: str | None = None
    argument: tuple[str, str] | None = None
    section: tuple[str, str] = ("", "")
    separator: str = ""
    single: bool = False


# By tool-call parser: exactly the form that the models were trained to write.
CALL_TAGS = {
    "hermes": CallTag(
        "<tool_call>",
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
        separator="\n",
    ),
    "functionary": CallTag("<function=", "<function=NAME>", "</function>"),
    "deepseek_v3": CallTag(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="\n",
    ),
    "deepseek_v3_1": CallTag(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": CallTag(
        "<|tool_call_begin|>",
        "<|tool_call_begin|>functions.NAME:",
        "<|tool_call_end|>",
        numbered="<|tool_call_argument_begin|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "nemotron_deci": CallTag(
        "<TOOLCALL>",
        '<TOOLCALL>[{"name": "NAME", "arguments": ',
        "}]</TOOLCALL>",
        single=True,
    ),
    "llama3_json": CallTag("", '{"name": "NAME", "parameters": ', "}", single=True),
    "qwen3_coder": CallTag(
        "<tool_call>",
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        argument=("<parameter=KEY>\n", "\n</parameter>\n"),
        separator="\n",
    ),
    "glm45": CallTag(
        "<tool_call>",
        "<tool_call>NAME\n",
        "</tool_call>",
        argument=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
        separator="\n",
    ),
    "minimax_m2": CallTag(
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        "</invoke>\n</minimax:tool_call>",
        argument=('<parameter name="KEY">', "</parameter>\n"),
        single=True,
    ),
    "harmony": CallTag(
        "",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "",
        single=True,
    ),
}


def has_call_form(parser: str | None) -> bool:
    """True if engines can be held to the calls of `parser`."""
    return parser in CALL_TAGS


def json_node(document: Any) -> Node:
    return {"type": "json_schema", "json_schema": document}


def structural_tag(node: Node) -> Node:
    return {"type": "structural_tag", "format": node}


def calls_in_text(parser: str | None, tools: list[Tool], *, strict_only: bool) -> Node | None:
    """Free text with calls of `tools` in the form of `parser`; None if it has none.

    Arguments of strict tools must match their schema; those of others, any JSON object. With
    `strict_only` the tag is for the sake of schemas, which not all forms can follow.
    """
    form = CALL_TAGS.get(parser or "")
    if form is None or not form.trigger or (strict_only and form.argument is not None):
        return None
    named = by_model_name(tools).items()
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": [_tag(form, name, tool, tool.strict) for name, tool in named],
    }


def calls_alone(parser: str | None, tools: list[Tool], parallel: bool) -> Node | None:
    """Calls of `tools` in the form of `parser` and nothing else; None if it has none."""
    form = CALL_TAGS.get(parser or "")
    if form is None:
        return None
    tags = [_tag(form, name, tool, True) for name, tool in by_model_name(tools).items()]
    if form.single or not parallel:
        calls: Node = _any_of(tags)
    else:
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator,
            "at_least_one": True,
        }
    before, after = form.section
    return _sequence([*_const(before), calls, *_const(after)])


def after_thinking(
    body: Node, reasoning: ReasoningGrammar | None, begun: bool, may_lack: bool
) -> Node:
    """Thinking in the form of `reasoning`, then `body`.

    `begun`: the prompt may have opened the thinking. `may_lack`: `body` alone is allowed, too.
    """
    if reasoning is None:
        return body
    begins = [*([""] if begun else []), reasoning.begin[0]]
    thoughts = [
        _sequence([_enclosed(begin, ANY_TEXT, reasoning.end[0]), _SPACE]) for begin in begins
    ]
    return _sequence([_any_of([*thoughts, *([_NOTHING] if may_lack else [])]), body])


def harmony_answer(calls: Node | None, final: Node | None) -> Node:
    """Optional thinking, then calls or a text of the channel `final`, in gpt-oss's format."""
    text = None if final is None else _sequence([*_const(_HARMONY_FINAL), final])
    body = _any_of([node for node in (calls, text) if node is not None])
    thought = _enclosed(_HARMONY_THINKING.begin[0], ANY_TEXT, _HARMONY_THINKING.end[0])
    thinking = _sequence([thought, *_const(_HARMONY_NEXT)])
    return _sequence([_any_of([thinking, _NOTHING]), body])


def either(nodes: Iterable[Node]) -> Node:
    return _any_of(list(nodes))


def _tag(form: CallTag, name: str, tool: Tool, bound: bool) -> Node:
    begin = form.begin.replace(NAME, name)
    if form.argument is not None:
        return _enclosed(begin, _arguments(form.argument, schema(tool)), form.end)
    content = json_node(embedded_arguments(schema(tool) if bound else {}))
    if form.numbered is not None:
        number = {"type": "regex", "pattern": "[0-9]+"}
        content = _sequence([number, *_const(form.numbered), content])
    return _enclosed(begin, content, form.end)


def _arguments(form: tuple[str, str], parameters: dict[str, Any]) -> Node:
    """The arguments that the schema names, each of the types that it states."""
    begin, end = form
    named = parameters.get("properties")
    if not isinstance(named, dict) or not named:
        return ANY_TEXT if parameters.get("additionalProperties") else _SPACE
    tags = [_enclosed(begin.replace(KEY, name), _value(parameters, name), end) for name in named]
    return {"type": "tags_with_separator", "tags": tags, "separator": ""}


def _value(parameters: dict[str, Any], name: str) -> Node:
    kinds = property_kinds(parameters, name)
    return ANY_TEXT if not kinds or "string" in kinds else json_node({"type": sorted(kinds)})


def _enclosed(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _const(text: str) -> list[Node]:
    return [{"type": "const_string", "value": text}] if text else []


def _sequence(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "sequence", "elements": nodes}


def _any_of(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}
