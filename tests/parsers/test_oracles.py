"""kvmesh's parsers beside those of SGLang and vLLM, on outputs with and without mistakes."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from parsers.corpus import Output, corpus
from unit.frontend.dialects.outputs import pieces, read

from kvmesh.frontend.dialects.output import choose_grammar
from kvmesh.frontend.dialects.tools import function

pytestmark = [pytest.mark.parsers, pytest.mark.timeout(1800)]
VLLM_VENV = os.environ.get("VLLM_VENV", ".venv-vllm")
ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent


class Reading(NamedTuple):
    """The result of a parser: text without white space, and calls with decoded arguments."""

    text: str
    calls: tuple[tuple[str, Any], ...]


def ours(output: Output) -> Reading:
    grammar = choose_grammar("", tool_parser=output.family.parser, reasoning_parser="none")
    found = pieces(read(grammar.parser(output.tools, eager=False), [output.text]))
    text = "".join(content for kind, _, content in found if kind != "call")
    calls = tuple((name, content) for kind, name, content in found if kind == "call")
    return Reading(solid(text), calls)


def solid(text: str) -> str:
    return "".join(text.split())


def oracle(python: str, script: str, asked: Iterable[tuple[str, Output]]) -> list[Reading | str]:
    """The readings of an oracle; its error in place of a reading."""
    lines = [
        json.dumps({"parser": name, "tools": [*map(function, output.tools)], "output": output.text})
        for name, output in asked
    ]
    command = [str(ROOT / python), str(HERE / script)]
    shown = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr[-4000:]
    found: list[Reading | str] = []
    for line in shown.stdout.splitlines():
        if not line.startswith("{"):
            continue
        answer = json.loads(line)
        if "error" in answer:
            found.append(answer["error"])
        else:
            calls = tuple((name, arguments(text)) for name, text in answer["calls"])
            found.append(Reading(solid(answer["text"]), calls))
    assert len(found) == len(lines), shown.stderr[-4000:]
    return found


def arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# Changes that an oracle reads as they were meant and kvmesh does not, by family, with the reason.
_NO_MARKER = "a call without a marker counts only at the start of the output"
_UNKNOWN = "Python calls of tools that the request lacks are text"
_OPEN_CALL = "a call that nothing ends is text: the output may have been cut off"
_LINE = "an empty line before the end of a call belongs to the value"
POLICIES = {
    ("llama3_json", "text before"): _NO_MARKER,
    ("llama3_json", "a mention"): _NO_MARKER,
    ("llama3_json", "first parameters missing"): "it is no call of this form",
    ("pythonic", "another name"): _UNKNOWN,
    ("olmo3", "another name"): _UNKNOWN,
    ("lfm2", "another name"): _UNKNOWN,
    ("glm45", "first </tool_call> missing"): _OPEN_CALL,
    ("glm45", "last </tool_call> missing"): _OPEN_CALL,
    ("glm47", "first </tool_call> missing"): _OPEN_CALL,
    ("glm47", "last </tool_call> missing"): _OPEN_CALL,
    ("qwen3_coder", "last </parameter> missing"): _LINE,
    ("mimo", "first </parameter> missing"): "a line break before the next tag belongs to the tag",
    ("gemma4", 'last <|"|> missing'): "nothing but the quote ends a string",
}

# Reasons of all other differences.
EQUAL = "equal"
RIGHT = "kvmesh alone reads the calls that were meant"
TEXT = "the same calls; kvmesh keeps the text beside them, and the markup that belongs to none"
CUT = "broken off: kvmesh makes no call of a part and keeps all of it as text"
NEITHER = "neither reads what was meant"
FAILED = "the oracle fails"
KNOWN = "policy"


def reason(output: Output, mine: Reading, theirs: Reading | str) -> str | None:
    """The reason of a difference; None if kvmesh is wrong as far as we know."""
    if isinstance(theirs, str):
        return FAILED
    if mine == theirs:
        return EQUAL
    if output.meant is None:
        return CUT
    if mine.calls == theirs.calls:
        return TEXT
    if mine.calls == output.meant:
        return RIGHT
    if theirs.calls != output.meant:
        return NEITHER
    return KNOWN if (output.family.parser, output.change) in POLICIES else None


@pytest.mark.parametrize(
    ("name", "python", "script"),
    [
        ("sglang", ".parsers/bin/python", "sglang_oracle.py"),
        ("vllm", f"{VLLM_VENV}/bin/python", "vllm_oracle.py"),
    ],
)
def test_every_difference_from_an_oracle_has_a_reason(name: str, python: str, script: str) -> None:
    asked = [
        (str(counterpart), output)
        for output in corpus()
        if (counterpart := getattr(output.family, name)) is not None
    ]
    counts: Counter[str] = Counter()
    unknown: list[tuple[Output, Reading, Reading | str]] = []
    for (_, output), theirs in zip(asked, oracle(python, script, asked), strict=True):
        mine = ours(output)
        found = reason(output, mine, theirs)
        counts[found or "unknown"] += 1
        if found is None:
            unknown.append((output, mine, theirs))
    print(f"\n{name}: {len(asked)} outputs")
    for found, count in counts.most_common():
        print(f"  {count:5} {found}")
    assert unknown == []


def test_unchanged_outputs_are_read_as_they_were_meant() -> None:
    for output in corpus():
        if output.change in ("none", "text after"):
            assert ours(output).calls == output.meant, output
