"""Outputs of every family that an oracle reads too: as templates write them, and with mistakes."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.real_templates import real_templates
from unit.frontend.dialects.outputs import CASES, Piece
from unit.frontend.dialects.outputs import TOOLS as CASE_TOOLS
from unit.frontend.dialects.test_round_trip import TOOLS, TURNS, expected, loaded, written
from unit.frontend.dialects.written import CALLS
from unit.frontend.dialects.written import FAMILIES as WRITTEN

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.families import CHANNELS, TOOL_ALIASES, TOOL_PARSERS
from kvmesh.frontend.dialects.grammar import Tagged, closing
from kvmesh.frontend.dialects.output import grammar_texts

SAID, DONE = "Let me see.\n", "\nDone."
BROKEN_OFF = "broken off"
_PARTS = (0.3, 0.6, 0.9)
_NAMES = re.compile(r"\b(write_file|write|now|get_weather|search)\b")
_THINKING = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\A(?:.*?</(?:seed:)?think>)\s*",
        r"\A\[THINK\].*?\[/THINK\]",
        r"\A<\|channel>.*?<channel\|>",
        r"\A<\|channel\|>analysis.*?<\|start\|>assistant",
        r"\AHere is my thought.*?Here is my response:\n",
    )
]


Calls = tuple[tuple[str, Any], ...]


class Family(NamedTuple):
    """A parser of kvmesh, the names of its counterparts, and a template that writes its calls."""

    parser: str
    sglang: str | None
    vllm: str | None
    template: str | None = None


FAMILIES = [
    Family("hermes", "hermes", "hermes", "llama-cpp-python/Qwen-Qwen2.5-7B-Instruct"),
    Family("qwen3_coder", "qwen3_coder", "qwen3_coder", "llama-cpp-python/Qwen3-Coder"),
    Family("seed_oss", None, "seed_oss", "llama-cpp-python/ByteDance-Seed-OSS"),
    Family(
        "llama3_json", "llama3", "llama3_json", "llama-cpp-python/meta-llama-Llama-3.1-8B-Instruct"
    ),
    Family("pythonic", "pythonic", "pythonic"),
    Family("mistral", "mistral", "mistral", "llama-cpp-python/unsloth-mistral-Devstral-Small-2507"),
    Family("deepseek_v3", "deepseekv3", "deepseek_v3"),
    Family("deepseek_v3_1", "deepseekv31", "deepseek_v31"),
    Family(
        "deepseek_v3_2", "deepseekv32", "deepseek_v32", "llama-cpp-python/deepseek-ai-DeepSeek-V3.2"
    ),
    Family("deepseek_v4", "deepseekv4", "deepseek_v4", "llama-cpp-python/deepseek-ai-DeepSeek-V4"),
    Family("kimi_k2", "kimi_k2", "kimi_k2", "llama-cpp-python/moonshotai-Kimi-K2"),
    Family("glm45", "glm45", "glm45", "llama-cpp-python/GLM-4.6"),
    Family("glm47", "glm47", "glm47", "llama-cpp-python/GLM-4.7-Flash"),
    Family("minimax_m2", "minimax-m2", "minimax_m2", "llama-cpp-python/MiniMax-M2"),
    Family("gemma4", "gemma4", "gemma4", "trl/gemma4_v5"),
    Family("functiongemma", None, "functiongemma"),
    Family("phi4_mini", None, "phi4_mini_json"),
    Family("granite", None, "granite"),
    Family("step3", "step3", "step3"),
    Family("jamba", None, "jamba"),
    Family("olmo3", None, "olmo3"),
    Family("lfm2", "lfm2", "lfm2", "trl/lfm2_v2"),
    Family("harmony", "gpt-oss", None, "llama-cpp-python/openai-gpt-oss-120b"),
    Family("cohere_command", None, None),
    Family("cohere_command4", "cohere_command4", None),
    Family("apertus", "apertus2509", "apertus"),
    Family("hunyuan_a13b", None, "hunyuan_a13b"),
    Family("hy_v3", "hunyuan", "hy_v3"),
    Family("ernie45", None, "ernie45"),
    Family("internlm", "interns1", "internlm"),
    Family("xlam", None, "xlam"),
    Family("longcat", None, "longcat"),
    Family("gigachat3", "gigachat3", "gigachat3"),
    Family("gigachat35", "gigachat35", None),
    Family("deepseekv41", "deepseekv41", "deepseek_v41"),
    Family("granite-20b-fc", None, "granite-20b-fc"),
    Family("plamo3", None, "plamo3"),
    Family("mimo", "mimo", "mimo"),
    Family("dots", "dots", "dots"),
    Family("minicpm5", "minicpm5", "minicpm5"),
    Family("iquest_q1", "iquest_q1", None),
    Family("k2_horizon", "k2_horizon", "k2_horizon"),
    Family("kimi_k3", "kimi_k3", "kimi_k3"),
    Family("minimax_m3", "minimax-m3", "minimax_m3"),
    Family("muse", "muse", None),
    Family("inkling", "inkling", None),
    Family("beam", "beam", None),
]


class Output(NamedTuple):
    """An output of a family; `change` names what was done to it.

    `meant` are the calls that the output had before, None if it was broken off.
    """

    family: Family
    source: str
    change: str
    tools: list[Tool]
    text: str
    meant: Calls | None


def corpus() -> list[Output]:
    """All outputs, each once; raises OSError without a package index."""
    found: dict[tuple[str, str], Output] = {}
    for family in FAMILIES:
        for source, tools, text, calls in _bases(family):
            for change, changed in _changes(family, text):
                made = Output(family, source, change, tools, changed, _meant(change, calls))
                found.setdefault((family.parser, changed), made)
    return list(found.values())


def _bases(family: Family) -> Iterator[tuple[str, list[Tool], str, Calls]]:
    """Outputs without mistakes and without thinking, and their calls."""
    for number, case in enumerate(case for case in CASES if case.tool == family.parser):
        raw = case.raw
        for thinking in _THINKING:
            raw = thinking.sub("", raw)
        yield f"case {number}", CASE_TOOLS, raw, _calls(case.pieces)
    for number, form in enumerate(form for form in WRITTEN if form.tool == family.parser):
        for calls in CALLS:
            raw = form.write([("call", name, arguments) for name, arguments in calls])
            yield f"form {number}", CASE_TOOLS, raw, tuple(calls)
    if family.template is None:
        return
    assert family.template in real_templates()
    chosen = loaded(family.template)
    assert chosen is not None, family.template
    for kind, turn in TURNS.items():
        shown = written(chosen[0], turn) if "thinking" not in kind else None
        if shown is not None:
            output = _THINKING[0].sub("", shown[1])
            yield kind, TOOLS, output, _calls(expected(turn, output))


def _calls(found: list[Piece]) -> Calls:
    return tuple((name, arguments) for kind, name, arguments in found if kind == "call")


def _meant(change: str, calls: Calls) -> Calls | None:
    if change == BROKEN_OFF:
        return None
    if change == "another name":
        renamed = json.loads(_NAMES.sub("other", json.dumps(calls, ensure_ascii=False)))
        return tuple((name, arguments) for name, arguments in renamed)
    return calls * 2 if change == "twice" else calls


def _changes(family: Family, text: str) -> Iterator[tuple[str, str]]:
    yield "none", text
    yield "text before", SAID + text
    yield "text after", text + DONE
    yield "twice", text + text
    yield "another name", _NAMES.sub("other", text)
    for part in _PARTS:
        yield BROKEN_OFF, text[: int(len(text) * part)]
    yield "raw line breaks", text.replace("\\n", "\n")
    for marker in _markers(family):
        if marker in text:
            yield f"first {marker} missing", text.replace(marker, "", 1)
            at = text.rfind(marker)
            yield f"last {marker} missing", text[:at] + text[at + len(marker) :]
            yield "a mention", f"Calls begin with {marker} here.\n{text}"
    for marker in _closers(family):
        if marker in text:
            yield f"first {marker} doubled", text.replace(marker, marker * 2, 1)
            at = text.rfind(marker)
            yield f"last {marker} doubled", text[:at] + marker + text[at:]


def _closers(family: Family) -> list[str]:
    """The tags that end calls and their arguments."""
    grammar = TOOL_PARSERS.get(_ours(family))
    if grammar is None:
        return []
    ends = [mark for form in grammar.forms for mark in closing(form)]
    ends += [form.value_end for form in grammar.forms if isinstance(form, Tagged)]
    return sorted({mark for mark in (*ends, *grammar.end) if "`" not in mark})


def _ours(family: Family) -> str:
    name = family.parser.replace("-", "_")
    return TOOL_ALIASES.get(name, name)


def _markers(family: Family) -> list[str]:
    if family.parser == "harmony":
        return ["<|call|>", "<|channel|>", "<|message|>", "<|start|>assistant", "<|constrain|>"]
    name = _ours(family)
    grammar = TOOL_PARSERS.get(name) or CHANNELS[name]
    return sorted({text for text in grammar_texts(grammar) if len(text) > 2})
