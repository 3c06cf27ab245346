"""Comparison of an answer that a client returns with the generated one, by their meaning. Pure.

Clients write the arguments of tool calls anew: in the order of the tool's schema, with its
defaults, with numbers in place of texts. Two arguments are equal if they mean the same under that
schema; a difference in meaning is an edit of the client, which the prompt must show.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from kvmesh.frontend.conversation import GAP, Block, GenerateRequest, Text, Thinking, Tool, ToolCall
from kvmesh.frontend.dialects.parsing.coerce import resolve
from kvmesh.frontend.dialects.tools import by_model_name, model_name

MAX_STEPS = 20_000  # values and schemas that the comparison of one call visits
MAX_REQUEST_STEPS = 100_000  # those of all calls of a request
MAX_DEPTH = 64
MAX_REFERENCE = 512  # characters
_ABSENT = object()
_CLAUDE_CODE = "claude-code"
_DIRECTORY = re.compile(r"orking directory:?[ \t]*([^\n]+)")  # fast: it begins with plain text
_LINE_END = re.compile(r"(\r\n|\n|\r)")
_CHANGE_DIRECTORY = re.compile(r"cd (?:'([^']+)'|\"([^\"]+)\"|(\S+)) && ")
# Claude Code cuts blanks at the ends of lines in these arguments of its tools.
_TRIMMED = {
    "Write": frozenset(("content",)),
    "Edit": frozenset(("old_string", "new_string")),
    "MultiEdit": frozenset(("old_string", "new_string")),
    "NotebookEdit": frozenset(("new_source",)),
}


class AnswerComparison:
    """Compares returned answers of one request with generated ones, under its tools' schemas."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._tools: dict[str, Tool] | None = None
        self._hashes: dict[int, int] = {}  # of schemas, by the id of their tool
        self._steps = MAX_REQUEST_STEPS
        self._directories: frozenset[str] | None = None

    def same(self, generated: Sequence[Block], returned: Sequence[Block]) -> bool:
        """True if a client may have made `returned` of `generated` without a change of meaning.

        It may leave out thinking, and the text beside calls.
        """
        calls, back = _calls(generated), _calls(returned)
        if [call.id for call in calls] != [call.id for call in back]:
            return False
        thinking, text = _joined(returned, Thinking), _joined(returned, Text)
        if thinking and thinking != _joined(generated, Thinking):
            return False
        if (text or not calls) and text != _joined(generated, Text):
            return False
        return all(map(self.same_call, calls, back))

    def same_call(self, generated: ToolCall, returned: ToolCall) -> bool:
        """True if two calls name one tool and have equal arguments."""
        name = model_name(generated.name, generated.namespace)
        if name != model_name(returned.name, returned.namespace):
            return False
        if generated.arguments == returned.arguments:
            return True
        if generated.custom or returned.custom:
            return generated.arguments.rstrip() == returned.arguments.rstrip()
        before, after = _parsed(generated.arguments), _parsed(returned.arguments)
        if before is _ABSENT or after is _ABSENT:
            return False
        tool = self._tool(name)
        schema = tool.parameters if tool is not None else {}
        habits = self if self._request.agent.startswith(_CLAUDE_CODE) else None
        comparison = _ArgumentComparison(schema, generated.name, habits, self._steps)
        same = comparison.same(before, after)
        self._steps -= comparison.used
        return same

    @property
    def exhausted(self) -> bool:
        """True if calls may differ only since too many have been compared."""
        return self._steps <= 0

    def names_directory(self, path: str) -> bool:
        """True if the request's first messages name `path` as the working directory."""
        if self._directories is None:
            texts = (
                block.text
                for message in self._request.messages[:4]
                for block in message.blocks
                if isinstance(block, Text)
            )
            found = [match[1].strip() for text in texts for match in _DIRECTORY.finditer(text)]
            # the rest of the line, or its first word in a sentence
            words = [rest.split()[0] for rest in found if rest]
            named = (path.strip("`'\"").rstrip("/.,`'\"") for path in found + words)
            self._directories = frozenset(filter(None, named))
        return path.rstrip("/") in self._directories

    def schemas(self, blocks: Sequence[Block]) -> int:
        """A hash of the schemas of the tools that `blocks` call."""
        tools = [self._tool(model_name(call.name, call.namespace)) for call in _calls(blocks)]
        return hash(tuple(map(self._schema_hash, tools)))

    def _schema_hash(self, tool: Tool | None) -> int:
        if tool is None:
            return 0
        known = self._hashes.get(id(tool))
        if known is None:
            known = self._hashes[id(tool)] = hash(_encoded(tool.parameters))
        return known

    def _tool(self, name: str) -> Tool | None:
        if self._tools is None:
            self._tools = by_model_name(self._request.tools)
        return self._tools.get(name)


class _ArgumentComparison:
    """One comparison of arguments; it gives up after `most` steps, or MAX_STEPS.

    `habits`: of Claude Code.
    """

    def __init__(
        self, schema: Any, tool: str, habits: AnswerComparison | None, most: int = MAX_STEPS
    ) -> None:
        self._schema = schema
        self._habits = habits
        self._trimmed = _TRIMMED.get(tool, frozenset()) if habits is not None else frozenset()
        self._shell = tool == "Bash"
        self._most = self._steps = min(most, MAX_STEPS)

    @property
    def used(self) -> int:
        """The steps so far."""
        return self._most - self._steps

    def same(self, one: Any, other: Any) -> bool:
        return self._same(one, other, [self._schema], MAX_DEPTH, "")

    def _same(self, one: Any, other: Any, nodes: list[Any], depth: int, field: str) -> bool:
        """True if the two are equal under one of the schemas `nodes`; `field` holds them."""
        self._steps -= 1
        if self._steps < 0 or depth == 0:
            return False
        if type(one) is type(other) and not isinstance(one, dict | list):
            return bool(one == other) or self._same_text(one, other, field)
        if isinstance(one, int | float) and isinstance(other, int | float):
            return one == other and not isinstance(one, bool) and not isinstance(other, bool)
        nodes = self._options(nodes)
        if isinstance(one, dict) and isinstance(other, dict):
            return self._same_object(one, other, nodes, depth)
        if isinstance(one, list) and isinstance(other, list):
            items = [node["items"] for node in nodes if isinstance(node.get("items"), dict)]
            return len(one) == len(other) and all(
                self._same(a, b, items, depth - 1, field) for a, b in zip(one, other, strict=True)
            )
        kinds = _kinds(nodes)
        return self._same_coerced(one, other, kinds, nodes, depth, field) or self._same_coerced(
            other, one, kinds, nodes, depth, field
        )

    def _same_object(
        self, one: dict[str, Any], other: dict[str, Any], nodes: list[Any], depth: int
    ) -> bool:
        for key in one.keys() | other.keys():
            inner = self._options(_properties(nodes, key))
            a, b = one.get(key, _ABSENT), other.get(key, _ABSENT)
            if a is not _ABSENT and b is not _ABSENT:
                if not self._same(a, b, inner, depth - 1, key):
                    return False
                continue
            value = b if a is _ABSENT else a
            defaults = [node["default"] for node in inner if "default" in node]
            if not any(self._same(value, given, inner, depth - 1, key) for given in defaults):
                return False
        return True

    def _same_coerced(
        self, text: Any, value: Any, kinds: frozenset[str], nodes: list[Any], depth: int, field: str
    ) -> bool:
        """True if the schema allows what `text` spells, and that is `value`."""
        if not isinstance(text, str) or isinstance(value, str):
            return False
        allowed = bool(kinds & _allowed(value))
        if "string" in kinds:
            # where both may stand, no client changes one for the other
            return not allowed and isinstance(value, int | float) and text in _spellings(value)
        if not allowed:
            return False
        spelled = _parsed(text.lower() if isinstance(value, bool) else text)
        if spelled is _ABSENT or isinstance(spelled, str):
            return False
        return self._same(spelled, value, nodes, depth - 1, field)

    def _same_text(self, generated: Any, returned: Any, field: str) -> bool:
        if self._habits is None or not isinstance(generated, str):
            return False
        if field in self._trimmed:
            return bool(returned == _without_line_blanks(generated))
        if self._shell and field == "command":
            found = _CHANGE_DIRECTORY.match(generated)
            if found is None or generated[found.end() :] != returned:
                return False
            return self._habits.names_directory(found[1] or found[2] or found[3])
        return False

    def _options(self, nodes: list[Any]) -> list[dict[str, Any]]:
        """The schemas with their references resolved and their alternatives beside them."""
        found: dict[int, dict[str, Any]] = {}
        waiting = list(nodes)
        while waiting and self._steps > 0:
            self._steps -= 1
            node = waiting.pop()
            if not isinstance(node, dict) or id(node) in found:
                continue
            found[id(node)] = node
            reference = node.get("$ref")
            if isinstance(reference, str) and len(reference) <= MAX_REFERENCE:
                waiting.append(resolve(reference, self._schema))
            for key in ("anyOf", "oneOf", "allOf"):
                options = node.get(key)
                waiting += options if isinstance(options, list) else []
        return list(found.values())


def _encoded(schema: Any) -> bytes:
    try:
        return msgspec.json.encode(schema)
    except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError, RecursionError):
        return b""


def _calls(blocks: Sequence[Block]) -> list[ToolCall]:
    return [block for block in blocks if isinstance(block, ToolCall)]


def _joined(blocks: Sequence[Block], kind: type[Text] | type[Thinking]) -> str:
    """The texts of one kind without blanks around them and at the ends of their lines."""
    texts = (_trimmed(block.text).strip() for block in blocks if isinstance(block, kind))
    return GAP.join(text for text in texts if text)


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _without_line_blanks(text: str) -> str:
    """As Claude Code writes files: without blanks at the ends of lines, which stay as they are."""
    parts = _LINE_END.split(text)
    return "".join(part if number % 2 else part.rstrip() for number, part in enumerate(parts))


def _parsed(text: str) -> Any:
    """The value of a JSON text, an empty one being {}; _ABSENT if it is none."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return _ABSENT


def _kinds(nodes: list[dict[str, Any]]) -> frozenset[str]:
    kinds: set[str] = set()
    for node in nodes:
        named = node.get("type")
        names = named if isinstance(named, list) else [named]
        kinds.update(name for name in names if isinstance(name, str))
    return frozenset(kinds)


def _allowed(value: Any) -> frozenset[str]:
    """The JSON types of a value."""
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int | float):
        return frozenset(("integer", "number"))
    return frozenset(("array",) if isinstance(value, list) else ("object",))


def _spellings(value: Any) -> set[str]:
    """The texts that stand for a number or a truth value."""
    spellings = {json.dumps(value)}
    if isinstance(value, float) and value.is_integer():
        spellings.add(str(int(value)))
    return spellings


def _properties(nodes: list[dict[str, Any]], key: str) -> list[Any]:
    """The schemas of a property."""
    found = []
    for node in nodes:
        named = node.get("properties")
        if isinstance(named, dict) and key in named:
            found.append(named[key])
        else:
            found.append(node.get("additionalProperties"))
    return found
