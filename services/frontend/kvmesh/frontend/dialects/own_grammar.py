"""The grammar that a model's folder brings along, in the field `own_parser` of its `kvmesh.json`.

Any worker may publish a model's files, so a grammar has no patterns, and few and short markers.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.frontend.dialects.errors import DialectError
from kvmesh.frontend.dialects.grammar import (
    Elements,
    JsonObjects,
    KeyedLiterals,
    NamedJson,
    OwnGrammar,
    Tagged,
    closing,
    opening,
)
from kvmesh.frontend.dialects.output import OutputGrammar, choose_grammar, grammar_texts

FILE = "kvmesh.json"
MAX_BYTES, MAX_FORMS, MAX_MARKERS, MAX_LENGTH = 1 << 16, 4, 64, 128


class _Hints(Struct):
    own_parser: OwnGrammar | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


_hints = msgspec.json.Decoder(_Hints)


def own_grammar(files: Mapping[str, bytes]) -> OwnGrammar | None:
    """The grammar in these files of a model; None without one. Raises DialectError."""
    data = files.get(FILE, b"")
    if b"own_parser" not in data:
        return None
    if len(data) > MAX_BYTES:
        raise DialectError(f"{FILE} has more than {MAX_BYTES:,} bytes")
    try:
        own = _hints.decode(data).own_parser
    except msgspec.DecodeError as error:
        raise DialectError(f"{FILE}: {error}") from error
    if own is not None and (fault := fault_of(own)):
        raise DialectError(f"own_parser in {FILE}: {fault}")
    return own


def own_output_grammar(folder: Path) -> OutputGrammar:
    """The grammar that `kvmesh.json` in a model's folder names; raises DialectError or OSError."""
    data = (folder / FILE).read_bytes()
    own = own_grammar({FILE: data})
    hints = _hints.decode(data)
    tool, reasoning = hints.tool_parser, hints.reasoning_parser
    return choose_grammar(folder.name, tool_parser=tool, reasoning_parser=reasoning, own=own)


def fault_of(own: OwnGrammar) -> str:
    """The fault of a grammar; empty if it has none."""
    texts = [*grammar_texts(own.tool_calls), *grammar_texts(own.reasoning)]
    if len(texts) > MAX_MARKERS or any(len(text) > MAX_LENGTH for text in texts):
        return f"more than {MAX_MARKERS} markers, or one of more than {MAX_LENGTH} characters"
    calls, thinking = own.tool_calls, own.reasoning
    if calls is not None:
        forms = calls.forms
        if not 0 < len(forms) <= MAX_FORMS:
            return f"one to {MAX_FORMS} forms of calls are possible"
        if any(isinstance(form, NamedJson) and form.name != NamedJson().name for form in forms):
            return "a name is no pattern here"
        if any(not _begins(form, calls.begin) for form in forms):
            return "nothing tells where a call begins"
        marks = (
            calls.begin,
            calls.end,
            calls.separators,
            *map(closing, forms),
            *map(_needed, forms),
        )
        if not all(chain(*marks)) or any(mark.isspace() for mark in calls.openers):
            return "a marker is empty"
    if thinking is not None and not (all((*thinking.begin, *thinking.end)) and thinking.end):
        return "thinking needs marks of its end, and no mark may be empty"
    return ""


def _needed(form: object) -> tuple[str, ...]:
    """The markers without which a form cannot be read."""
    match form:
        case Tagged():
            return form.key, form.value_end
        case Elements():
            return (form.item,)
        case KeyedLiterals():
            return (form.quote,)
        case JsonObjects():
            return (*form.names, *form.arguments)
    return ()


def _begins(form: object, begin: tuple[str, ...]) -> bool:
    marks = opening(form)  # type: ignore[arg-type]
    return bool(begin) or getattr(form, "bare", False) or (bool(marks) and all(marks))
