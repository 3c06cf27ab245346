"""The form of an answer: one description for the engine's constraint and for the parser. Pure."""

from threading import Lock
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Guided
from kvmesh.frontend.conversation import GenerateRequest, Tool
from kvmesh.frontend.dialects.embedded_schemas import embedded, embedded_arguments
from kvmesh.frontend.dialects.output import (
    OutputGrammar,
    OutputParser,
    PlainText,
    Thoughts,
)
from kvmesh.frontend.dialects.parsing.coerce import root_kinds
from kvmesh.frontend.dialects.structural_tags import (
    Node,
    after_thinking,
    calls_alone,
    calls_in_text,
    either,
    harmony_answer,
    has_call_form,
    json_node,
    structural_tag,
)
from kvmesh.frontend.dialects.tools import model_name
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.models import ServedModel
from kvmesh.frontend.preprocess.constrained_output import (
    ARRAY_STARTS,
    JSON_STARTS,
    TOOL_CALLS,
    AllowedCalls,
    AnswerOpening,
    CallListReader,
    ConstrainedParser,
    OneToolReader,
    TextReader,
)
from kvmesh.runtime.lru import LruCache

_ANY = "(.|\\n)+"
_OBJECT = {"type": "object"}
_REFERENCE = b'"$ref"'
_REWRITTEN = ('"$ref"', 'Ref"', '"items":[', ":null")  # what schemas have that `embedded` changes
MEMO_BYTES = 32 << 20
SIZE = 24  # times its JSON: at most what a tool takes in memory


class OutputForm(Struct, frozen=True, kw_only=True):
    """The parts that an answer may have: thinking, then calls, a text, or either.

    - `tools`: those that the prompt shows; `callable`: those that `tool_choice` lets through.
    - `calls`: none, if the model decides, or at least one.
    - `text`: what the text must match; None if it is free.
    - `thoughts`: the thinking at the beginning, as `prompt`, the prompt's end, shows.
    - `tags`: the engine follows structural tags; `exempt`: it constrains no thinking.
    """

    tools: list[Tool]
    callable: list[Tool]
    calls: Literal["none", "optional", "required"]
    parallel: bool
    text: Guided | None
    grammar: OutputGrammar
    tags: bool
    exempt: bool
    thoughts: Thoughts = "none"
    prompt: str = ""

    def after(self, prompt: str, thinking: bool | None) -> "OutputForm":
        """The form after a prompt with this end; `thinking` is what the request asks for."""
        thoughts = self.grammar.thoughts(prompt)
        if thoughts == "possible" and thinking is False and not self.grammar.harmony:
            thoughts = "none"
        return replace(self, thoughts=thoughts, prompt=prompt)

    @property
    def begins_thinking(self) -> bool:
        return self.thoughts in ("opened", "expected")

    @property
    def rewrites_calls(self) -> bool:
        """True if the constraint writes calls in another syntax than the model's own."""
        return self.calls == "required" or (self._either and not self._own_calls)

    @property
    def _either(self) -> bool:
        """True if the answer is calls or a constrained text."""
        return self.calls == "optional" and self.text is not None

    @property
    def _own_calls(self) -> bool:
        """True if the engine can be held to calls in the model's own syntax."""
        return self.tags and has_call_form(self.grammar.tool_parser)

    # --- the constraint ---

    def constraint(self) -> Guided | None:
        """The constraint of the engine; None for a free answer. Raises InvalidRequest."""
        free = self.calls != "required" and self.text is None
        if free and not self._constrains_calls:
            return None
        if self._either and self.text is not None and not self._joins_calls(self.text):
            reason = f"A constraint by {self.text.kind} leaves no way to call a tool"
            raise InvalidRequest(f"{reason}; send a `tool_choice` of `none`.", "tool_choice")
        try:
            return _CONSTRAINTS.of(self)
        except RecursionError as error:
            raise InvalidRequest("A JSON schema is nested too deeply.", "tools") from error

    def _joins_calls(self, text: Guided) -> bool:
        """True if the engine can be held to `text` or calls."""
        return _is_json(text) or (self._own_calls and self._allows_thinking)

    def made_constraint(self) -> Guided | None:
        """The constraint of an answer that is not free, made anew."""
        if self.calls != "required" and self.text is None:
            return self._calls_in_text()
        answer = self._answer()
        if not self._allows_thinking:
            return answer
        calls = None
        if self._either and self._own_calls:
            calls = calls_alone(self.grammar.tool_parser, self.callable, self.parallel)
        if self.grammar.harmony and not self.exempt:
            return _tag(harmony_answer(calls, _node(answer)))
        node = _node(answer) if calls is None else either([calls, _node(answer)])
        if self.thoughts == "none" or self.exempt:
            return answer if calls is None else _tag(node)
        begun = self.begins_thinking
        lone = self._shows_itself or not begun
        return _tag(after_thinking(node, self.grammar.reasoning, begun, lone))

    @property
    def _restricted(self) -> bool:
        return len(self.callable) < len(self.tools)

    @property
    def _constrains_calls(self) -> bool:
        """True if optional calls in free text are constrained: those of strict or allowed tools."""
        if self.calls == "none" or not self.tags:
            return False
        return self._restricted or any(tool.strict for tool in self.callable)

    def _calls_in_text(self) -> Guided | None:
        parser, strict_only = self.grammar.tool_parser, not self._restricted
        node = calls_in_text(parser, self.callable, strict_only=strict_only)
        return None if node is None else _tag(node)

    def _answer(self) -> Guided:
        """The constraint after the thinking, but for calls in the model's own syntax."""
        if self.calls == "required":
            return self._required()
        if self._either and not self._own_calls:
            return Guided(kind="json_schema", value=_json(self._calls_or_text()))
        assert self.text is not None
        value = self.text.value
        if self.text.kind != "json_schema" or not any(each in value for each in _REWRITTEN):
            return self.text
        return Guided(kind="json_schema", value=_json(embedded(msgspec.json.decode(value))))

    def _required(self) -> Guided:
        """The arguments of the only tool, or a list of `{"name", "parameters"}` objects."""
        if len(self.callable) > 1:
            return Guided(kind="json_schema", value=_json(self._call_list()))
        tool = self.callable[0]
        if tool.custom and tool.grammar:
            return Guided(kind="regex" if tool.regex else "grammar", value=tool.grammar)
        if tool.custom:
            return Guided(kind="regex", value=_ANY)
        return Guided(kind="json_schema", value=_json(embedded_arguments(tool.parameters)))

    def _calls_or_text(self) -> dict[str, Any]:
        """A schema of `{"tool_calls": […]}` or of the text, for engines that follow only JSON."""
        assert self.text is not None
        listed, place = self._call_list(), "#/$defs/text"
        text: Any = _OBJECT
        if self.text.kind == "json_schema":
            text = embedded(msgspec.json.decode(self.text.value), place)
        definitions = listed.pop("$defs", {}) | {"text": text}
        wrapped = {
            "type": "object",
            "properties": {TOOL_CALLS: listed},
            "required": [TOOL_CALLS],
            "additionalProperties": False,
        }
        return {"anyOf": [wrapped, {"$ref": place}], "$defs": definitions}

    # --- the parser ---

    def parser(self, eager: bool) -> OutputParser:
        """The parser of one output; `eager` as in `OutputGrammar.parser`.

        Where no call is allowed, one that breaks off is a call to be dropped, and no text.
        """
        eager = eager or not self.callable
        if self.calls == "required" or self.text is not None:
            parser = self._constrained(eager)
        else:
            thinks, calls = self.begins_thinking, bool(self.tools)
            parser = self.grammar.parser(
                self.tools, self.prompt, thinking=thinks, calls=calls, eager=eager
            )
        if not self._restricted:
            return parser
        names = frozenset(model_name(tool.name, tool.namespace) for tool in self.callable)
        return AllowedCalls(parser, names, self._openers)

    def _constrained(self, eager: bool) -> OutputParser:
        own = self.grammar.harmony and bool(self.tools)  # told from the text by their headers

        def made(thinking: bool) -> OutputParser:
            split = self.grammar.parser(
                self.tools, self.prompt, thinking=thinking, calls=own, eager=eager
            )
            return self._read(split, eager)

        reasoning = self.grammar.reasoning
        if reasoning is None or not self.begins_thinking:
            return made(False)
        unmarked = not self.exempt and not self._allows_thinking
        return AnswerOpening(made, self._starts, reasoning.end, unmarked)

    def _read(self, split: OutputParser, eager: bool) -> OutputParser:
        """The parser of the text that `split` separates from thinking."""
        if not self.tools:
            return split
        calls = msgspec.structs.replace(self.grammar, reasoning_parser=None)
        own = calls.parser(self.tools, eager=eager)
        if self.calls == "required":
            return ConstrainedParser(split, [self._required_reading(eager)], own)
        bare = self.grammar.calls.bare if self.grammar.calls is not None else ""
        texts = tuple(start for start in ("{", "[", '"') if start not in bare)
        readings = [TextReader(texts, PlainText())]
        if self.rewrites_calls:
            listed = CallListReader(self.callable)
            readings.insert(0, TextReader((f'{{"{TOOL_CALLS}":[',), listed))
        return ConstrainedParser(split, readings, own, self._openers)

    @property
    def _openers(self) -> tuple[str, ...]:
        """The markers that begin calls in the model's own syntax."""
        calls = self.grammar.calls
        return () if calls is None else tuple(filter(None, calls.openers))

    def _required_reading(self, eager: bool) -> TextReader:
        if len(self.callable) > 1:
            return TextReader(("[{", "[]"), CallListReader(self.callable))
        tool = self.callable[0]
        return TextReader(("",) if tool.custom else ("{",), OneToolReader(tool, eager))

    @property
    def _shows_itself(self) -> bool:
        """True if the constrained text begins as no thinking does: as an object or an array."""
        return bool(self._kinds) and self._kinds <= {"object", "array"}

    @property
    def _starts(self) -> tuple[str, ...]:
        """Beginnings of the answer, without white space, that are no thinking."""
        kinds = self._kinds
        starts: tuple[str, ...] = ()
        if not kinds or kinds & {"object", "array"}:
            starts = JSON_STARTS
        if "array" in kinds and self.calls != "required":
            starts += ARRAY_STARTS
        if self.calls != "none":
            starts += tuple(filter(None, ("".join(each.split()) for each in self._openers)))
        return starts

    @property
    def _kinds(self) -> frozenset[str]:
        """The JSON types of the constrained text; empty if its schema does not tell."""
        if self.calls == "required":
            if len(self.callable) > 1:
                return frozenset(["array"])
            return frozenset(["string" if self.callable[0].custom else "object"])
        if self.text is None or self.text.kind == "json_object":
            return frozenset(["object"])
        if not _is_json(self.text):
            return frozenset(["string"])
        return root_kinds(msgspec.json.decode(self.text.value))

    @property
    def _allows_thinking(self) -> bool:
        """True if the constraint lets the model think first: engines embed no Lark grammars."""
        if self.calls != "required":
            return self.tags and (self.text is None or self.text.kind != "grammar")
        alone = len(self.callable) == 1
        lark = alone and self.callable[0].grammar is not None and not self.callable[0].regex
        return self.tags and not lark

    def _call_list(self) -> dict[str, Any]:
        """The schema of a list of calls; `$defs` has the parameters that refer to parts of them."""
        definitions: dict[str, Any] = {}
        items = [_call(tool, str(n), definitions) for n, tool in enumerate(self.callable)]
        limit = {} if self.parallel else {"maxItems": 1}
        calls = {"type": "array", "minItems": 1, **limit, "items": {"anyOf": items}}
        return calls | ({"$defs": definitions} if definitions else {})


class ConstraintMemo:
    """Constraints of the last forms: the turns of an agent have the same tools. Thread-safe."""

    def __init__(self) -> None:
        self._known: LruCache[tuple[object, ...], _Made] = LruCache(
            MEMO_BYTES, lambda _, made: made.size
        )
        self._lock = Lock()

    def of(self, form: OutputForm) -> Guided | None:
        """The constraint of a form that is not free."""
        key = (
            *map(id, form.callable),
            *(form.calls, form.parallel, form.text, form.thoughts, form.grammar),
            *(form.tags, form.exempt, len(form.callable) == len(form.tools)),
        )
        with self._lock:
            known = self._known.get(key)
        if known is None:
            guided = form.made_constraint()
            size = SIZE * len(msgspec.json.encode(form.callable))
            size += sum(len(each.value) for each in (form.text, guided) if each is not None)
            known = _Made(form.callable, guided, size)
            with self._lock:
                self._known.put(key, known)
        return known.guided


class _Made(NamedTuple):
    """A constraint, with its tools, whose ids stay theirs as long as it is known."""

    tools: list[Tool]
    guided: Guided | None
    size: int


_CONSTRAINTS = ConstraintMemo()


def output_form(request: GenerateRequest, model: ServedModel) -> OutputForm:
    """The form that a request asks for; raises InvalidRequest if no tool fits its `tool_choice`."""
    choice, tools = request.tool_choice, request.tools
    callable_tools = tools
    if choice.allowed is not None:
        allowed = set(choice.allowed)
        callable_tools = [t for t in tools if allowed & {t.name, model_name(t.name, t.namespace)}]
        known = {name for t in tools for name in (t.name, model_name(t.name, t.namespace))}
        if missing := next((name for name in choice.allowed if name not in known), None):
            raise _unsatisfied(f"no tool is named `{missing}`")
    if choice.mode == "required" and not callable_tools:
        raise _unsatisfied("it allows no tool" if tools else "the request has no tools")
    calls: Literal["none", "optional", "required"] = "none"
    if choice.mode != "none" and callable_tools:
        calls = "required" if choice.mode == "required" else "optional"
    return OutputForm(
        tools=tools,
        callable=[] if choice.mode == "none" else callable_tools,
        calls=calls,
        parallel=request.parallel_tool_calls,
        text=request.guided,
        grammar=model.dialect.grammar if request.messages else OutputGrammar(),
        tags=model.card.structural_tags,
        exempt=model.card.exempts_thinking,
    )


def _unsatisfied(reason: str) -> InvalidRequest:
    return InvalidRequest(f"`tool_choice` cannot be satisfied: {reason}.", "tool_choice")


def _call(tool: Tool, name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters: Any = {"type": "string"}
    if not tool.custom:
        place = f"#/$defs/{name}"
        parameters = embedded_arguments(tool.parameters, place)
        if _REFERENCE in msgspec.json.encode(parameters):
            definitions[name], parameters = parameters, {"$ref": place}
    called = {"type": "string", "enum": [model_name(tool.name, tool.namespace)]}
    return {
        "type": "object",
        "properties": {"name": called, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _node(guided: Guided) -> Node:
    match guided.kind:
        case "json_schema":
            return json_node(Raw(guided.value.encode()))
        case "regex":
            return {"type": "regex", "pattern": guided.value}
        case "choice":
            return either(
                {"type": "const_string", "value": each}
                for each in msgspec.json.decode(guided.value, type=list[str])
            )
        case _:
            return json_node(_OBJECT)


def _is_json(text: Guided) -> bool:
    return text.kind in ("json_object", "json_schema")


def _tag(node: Node) -> Guided:
    return Guided(kind="structural_tag", value=_json(structural_tag(node)))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
