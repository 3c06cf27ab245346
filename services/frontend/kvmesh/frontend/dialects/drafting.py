"""Drafts a model's grammar from what its chat template writes. Pure.

The template writes a turn with one call, with two, and with thinking. The name and the arguments
are known, so the rest of the text shows the form of a call, and what is around it.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.frontend.dialects.grammar import (
    CallForm,
    JsonObjects,
    KeyedLiterals,
    NamedJson,
    NameKeys,
    OwnGrammar,
    Pythonic,
    ReasoningGrammar,
    Tagged,
    ToolCallGrammar,
)
from kvmesh.frontend.dialects.output import OWN, OutputGrammar
from kvmesh.frontend.dialects.own_grammar import fault_of
from kvmesh.frontend.dialects.preview import merge_deltas
from kvmesh.frontend.dialects.read_back import calls_read, reads_thinking
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate
from kvmesh.frontend.dialects.templates.written_calls import ARGUMENTS, NAME, THOUGHT, TOOL

_TOKEN = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z_]+\]|\s+|[^\s<\[]+|.", re.DOTALL)
_BRACKETS = (JsonObjects, NameKeys, Pythonic)  # their readers skip the brackets of a list
_decoder = json.JSONDecoder()


class _Found(NamedTuple):
    """A call in a turn: where it is, and its form, without what is around it."""

    start: int
    end: int
    form: CallForm


class Draft(NamedTuple):
    """A grammar: it reads `read` of the `written` turns with calls of the template.

    `thinking`: it reads their thinking, too.
    """

    own: OwnGrammar
    read: int
    written: int
    thinking: bool

    @property
    def grammar(self) -> OutputGrammar:
        """The grammar as a frontend uses it."""
        own = self.own
        return OutputGrammar(OWN if own.tool_calls else None, OWN if own.reasoning else None, own)


def draft(template: ChatTemplate) -> Draft | None:
    """The grammar that reads most of what the template writes; None if it reads no call."""
    turns = [template.written_turn([ARGUMENTS] * count) for count in (1, 2)]
    thoughts = _thinking(template)
    one, two = (_calls_alone(template, turn.output, thoughts) if turn else "" for turn in turns)
    if two.count(NAME) != 2:
        two = ""  # the template shows one call in a turn
    written = len(template.written_calls) + bool(two)
    drafts = []
    for find in _FORMS:
        for calls in _calls(find, one, two):
            for thinking in (None, thoughts):
                made = Draft(OwnGrammar(calls, thinking), 0, written, False)
                if fault_of(made.own):
                    continue
                silent = replace(made.grammar, reasoning_parser=None)
                read = calls_read(template, made.grammar, silent)
                read += bool(two) and _reads_both(silent, two)
                thinks = reads_thinking(template, made.grammar)
                drafts.append(made._replace(read=read, thinking=thinks))
    best = max(drafts, key=lambda each: (each.read, each.thinking), default=None)
    return best if best is not None and best.read else None


def _calls_alone(template: ChatTemplate, output: str, thoughts: ReasoningGrammar | None) -> str:
    """The calls of a turn, without the marks of no thinking, the turn's end and what follows."""
    for mark in (*thoughts.begin, *thoughts.end) if thoughts else ():
        output = output.lstrip().removeprefix(mark)
    ends = next((token for token in _tokens(template.after_answer) if not token.isspace()), "")
    if ends:
        output = output.partition(ends)[0]
    result = _common(_tokens(output), _tokens(template.between_results), ends=True)
    return output.removesuffix(result)


def _reads_both(grammar: OutputGrammar, output: str) -> bool:
    """True if the grammar reads two calls with ARGUMENTS, and no text beside them."""
    parser = grammar.parser([TOOL], eager=False, new_id=lambda: "")
    pieces = merge_deltas(parser.feed(output) + parser.finish())
    calls = [text for kind, name, text in pieces if kind == "call" and name == NAME]
    return len(calls) == len(pieces) == 2 and all(json.loads(c) == ARGUMENTS for c in calls)


def _calls(find: Callable[[str], list[_Found]], one: str, two: str) -> Iterator[ToolCallGrammar]:
    """Grammars of the calls that `find` finds in a turn with one call and in one with two."""
    alone, both = find(one), find(two)
    if len(alone) != 1:
        return
    form = both[0].form if len(both) == 2 else alone[0].form
    if isinstance(form, NamedJson) and len(both) == 2:
        form = _without_ids(form, both[1].form)
    before, after = one[: alone[0].start], one[alone[0].end :]
    if len(both) != 2:
        yield from _marked(form, before, after, before, after)
        return
    between = two[both[0].end : both[1].start]
    for parts in (_tokens, list):  # by tags; by characters, where marks touch each other
        opened = _common(parts(before), parts(between), ends=True)
        closed = _common(parts(after), parts(between), ends=False)
        yield from _marked(form, before, after, opened, closed)


def _marked(
    form: CallForm, before: str, after: str, opened: str, closed: str
) -> Iterator[ToolCallGrammar]:
    """Grammars for the text around a section of calls; `opened` and `closed` are around each."""
    begin, end = before.removesuffix(opened), after.removeprefix(closed)
    if isinstance(form, _BRACKETS):
        opened, closed = opened.rstrip().removesuffix("["), closed.lstrip().removeprefix("]")
        begin, end = begin.rstrip().removesuffix("["), end.lstrip().removeprefix("]")
    marks = _Marks(begin.strip(), end.strip(), opened.strip(), closed.strip())
    for each in dict.fromkeys((_split(marks), marks, _of_section(marks))):
        around = _around(form, each.open, each.close, not (each.begin or each.open))
        yield ToolCallGrammar((around,), _mark(each.begin), _mark(each.end))


def _without_ids(form: NamedJson, other: CallForm) -> NamedJson:
    """The form of calls with an id between name and arguments, which differs."""
    if not isinstance(other, NamedJson) or form.between == other.between:
        return form
    one, two = _tokens("".join(form.between)), _tokens("".join(other.between))
    call_id, between = _common(one, two, ends=False), _common(one, two, ends=True)
    return NamedJson(between=_mark(between), call_id=call_id or None)


class _Marks(NamedTuple):
    """The marks around a section of calls, and around each call."""

    begin: str
    end: str
    open: str
    close: str


def _split(marks: _Marks) -> _Marks:
    """A section for each call, if several marks stand around it: its outer ones."""
    opened = [token for token in _tokens(marks.open) if not token.isspace()]
    if marks.begin or marks.end or not opened or not opened[0].endswith((">", "]")):
        return marks
    closed = [token for token in _tokens(marks.close) if not token.isspace()]
    if len(opened) == 1:
        return _of_section(marks)
    inner = marks.open.removeprefix(opened[0]).strip()
    last = closed[-1] if len(closed) > 1 else ""
    return _Marks(opened[0], last, inner, marks.close.removesuffix(last).strip())


def _of_section(marks: _Marks) -> _Marks:
    """The marks of each call as those of a section."""
    if marks.begin:
        return marks
    return _Marks(marks.open, marks.close or marks.end, "", "")


def _around(form: CallForm, opened: str, closed: str, bare: bool) -> CallForm:
    """The form with the marks around each call."""
    if isinstance(form, JsonObjects):
        return replace(form, open=_mark(opened), close=_mark(closed), bare=bare)
    if isinstance(form, Pythonic):
        return Pythonic(bare=bare)
    if isinstance(form, NamedJson):
        return replace(form, open=_mark(opened) or ("",), close=_mark(closed))
    if isinstance(form, Tagged):
        return replace(
            form,
            open=_mark(opened) or ("",),
            close=_mark(closed.removeprefix(form.value_end).strip()),
        )
    if isinstance(form, KeyedLiterals):
        return replace(form, open=_mark(opened) or ("",))
    return form


def _mark(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


def _thinking(template: ChatTemplate) -> ReasoningGrammar | None:
    """The grammar of the thinking before a call, if the template shows any."""
    turn = template.written_turn([ARGUMENTS], THOUGHT)
    if turn is None or THOUGHT not in turn.output:
        return None
    written, _, rest = turn.output.partition(THOUGHT)
    prompted = [token for token in _tokens(turn.prompts[-1]) if not token.isspace()]
    forced = not written.strip() and bool(prompted)
    begin = prompted[-1] if forced else written.strip()
    end = next((token for token in _tokens(rest) if not token.isspace()), "")
    if not begin or not end or NAME in end:
        return None
    return ReasoningGrammar((begin,), (end,), forced, calls_end_it=True)


def _tokens(text: str) -> list[str]:
    """The text in parts: tags, white space, and what is between them."""
    return _TOKEN.findall(text)


def _common(left: list[str], right: list[str], *, ends: bool) -> str:
    """The parts that both end with, or begin with."""
    pairs = (
        zip(reversed(left), reversed(right), strict=False)
        if ends
        else zip(left, right, strict=False)
    )
    shared: list[str] = []
    for one, other in pairs:
        if one != other:
            break
        shared.append(one)
    return "".join(reversed(shared) if ends else shared)


# Each finds the calls with ARGUMENTS in one form.


def _objects(text: str) -> Iterator[tuple[int, int, object]]:
    """The JSON objects in a text that do not overlap: (start, end, value)."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _decoder.raw_decode(text, at)
        except ValueError:
            at = text.find("{", at + 1)
            continue
        yield at, end, value
        at = text.find("{", end)


def _json_objects(text: str) -> list[_Found]:
    found = []
    for start, end, value in _objects(text):
        assert isinstance(value, dict)
        names = [key for key, each in value.items() if each == NAME]
        arguments = [key for key, each in value.items() if _is_arguments(each)]
        if names and arguments:
            form = JsonObjects((names[0],), (arguments[0],))
            found.append(_Found(start, end, form))
    return found


def _is_arguments(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return value == ARGUMENTS


def _name_keys(text: str) -> list[_Found]:
    return [
        _Found(start, end, NameKeys())
        for start, end, value in _objects(text)
        if value == {NAME: ARGUMENTS}
    ]


def _named_json(text: str) -> list[_Found]:
    found: list[_Found] = []
    for start, end, value in _objects(text):
        name = text.rfind(NAME, found[-1].end if found else 0, start)
        if value == ARGUMENTS and name >= 0:
            between = text[name + len(NAME) : start].strip()
            found.append(_Found(name, end, NamedJson(between=_mark(between))))
    return found


def _tagged(padding: str) -> Callable[[str], list[_Found]]:
    def find(text: str) -> list[_Found]:
        found: list[_Found] = []
        at = text.find(NAME)
        while at >= 0:
            made = _tagged_at(text, at, padding)
            if made is None:
                break
            found.append(made)
            at = text.find(NAME, made.end)
        return found

    return find


def _tagged_at(text: str, start: int, padding: str) -> _Found | None:
    """A call whose arguments have a tag each; its close is told from the text behind it."""
    items = list(ARGUMENTS.items())
    for order in (items, items[::-1]):
        marks, at = [], start + len(NAME)
        for part in (part for item in order for part in item):
            place = text.find(part, at)
            if place < 0:
                break
            marks.append(text[at:place])
            at = place + len(part)
        if len(marks) == 2 * len(order):
            break
    else:
        return None
    first, keyed, second = marks[0], marks[1], marks[2]
    rest = text[at:]
    key = _common(_tokens(first), _tokens(second), ends=True).strip()
    if not key:
        key = re.sub(r".*(?=<)", "", second, flags=re.DOTALL).strip()
    value_end = _common(_tokens(second), _tokens(rest), ends=False).strip()
    if not key or not value_end or not first.rstrip().endswith(key):
        return None
    parts = re.fullmatch(r"(.*?>)\s*(<.*)", keyed.strip(), re.DOTALL)
    key_end, value = parts.groups() if parts else (keyed.strip(), "")
    form = Tagged(
        open=("",),
        open_end=_mark(first.rstrip().removesuffix(key).strip()) or ("",),
        key=key,
        key_end=key_end,
        value_end=value_end,
        value=value or None,
        padding=padding,
    )
    return _Found(start, at + rest.find(value_end) + len(value_end), form)


def _pythonic(text: str) -> list[_Found]:
    pattern = re.escape(NAME) + r"\((?:[^()'\"]|'[^']*'|\"[^\"]*\")*\)"
    return [_Found(*match.span(), Pythonic(bare=False)) for match in re.finditer(pattern, text)]


def _keyed(text: str) -> list[_Found]:
    key, value = next(iter(ARGUMENTS.items()))
    pattern = (
        re.escape(NAME)
        + r"\{[^{}]*?"
        + key
        + r":(?P<quote>.{1,32}?)"
        + re.escape(value)
        + r"(?P=quote)[^{}]*\}"
    )
    return [
        _Found(*match.span(), KeyedLiterals(("",), match["quote"]))
        for match in re.finditer(pattern, text, re.DOTALL)
    ]


_FORMS = (
    _json_objects,
    _name_keys,
    _named_json,
    _tagged(""),
    _tagged("\n"),
    _pythonic,
    _keyed,
)
