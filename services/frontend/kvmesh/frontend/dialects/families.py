"""Grammars of the supported model families, as data: a new family is an entry here.

The formats are those published in each model's card, chat template or tool-calling guide.
"""

import re

from kvmesh.frontend.dialects.grammar import (
    JsonObjects,
    KeyedLiterals,
    NamedJson,
    Pythonic,
    ReasoningGrammar,
    Tagged,
    ToolCallGrammar,
)

# --- tool calls --------------------------------------------------------------------------------

_FUNCTION_TAGS = Tagged(
    open=("<function=",),
    open_end=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    close=("</function>",),
    padding="\n",
)
_SEED_TAGS = Tagged(
    open=("<function=",),
    open_end=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    close=("</function>",),
)
_ARGUMENT_TAGS = Tagged(
    open=("",),
    open_end=("",),
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
)
_DEEPSEEK_END = "<｜tool▁call▁end｜>"


TOOL_PARSERS: dict[str, ToolCallGrammar] = {
    "hermes": ToolCallGrammar((JsonObjects(),), ("<tool_call>",), ("</tool_call>",)),
    "qwen3_coder": ToolCallGrammar((_FUNCTION_TAGS,), ("<tool_call>",), ("</tool_call>",)),
    "seed_oss": ToolCallGrammar((_SEED_TAGS,), ("<seed:tool_call>",), ("</seed:tool_call>",)),
    "llama3_json": ToolCallGrammar((JsonObjects(bare=True),), ("<|python_tag|>",)),
    "functionary": ToolCallGrammar(
        (NamedJson(open=("<function=",), between=(">",), close=("</function>",)),)
    ),
    "pythonic": ToolCallGrammar((Pythonic(),), ("<|python_start|>",), ("<|python_end|>",)),
    "mistral": ToolCallGrammar(
        (JsonObjects(), NamedJson(between=("[ARGS]",), call_id="[CALL_ID]")),
        ("[TOOL_CALLS]",),
        ("[/TOOL_CALLS]",),
    ),
    "deepseek_v3": ToolCallGrammar(
        (
            NamedJson(
                open=("<｜tool▁call▁begin｜>",),
                before=("function<｜tool▁sep｜>",),
                between=("```json", "```"),
                close=("```", _DEEPSEEK_END),
            ),
        ),
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁end｜>",),
    ),
    "deepseek_v3_1": ToolCallGrammar(
        (
            NamedJson(
                open=("<｜tool▁call▁begin｜>",),
                between=("<｜tool▁sep｜>",),
                close=(_DEEPSEEK_END,),
            ),
        ),
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁end｜>",),
    ),
    # Each parameter states whether it is a string. V4 calls the section tool_calls.
    "deepseek_v3_2": ToolCallGrammar(
        (
            Tagged(
                open=("<｜DSML｜invoke name=",),
                open_end=(">",),
                key="<｜DSML｜parameter name=",
                key_end=">",
                value_end="</｜DSML｜parameter>",
                close=("</｜DSML｜invoke>",),
            ),
        ),
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    "kimi_k2": ToolCallGrammar(
        (
            NamedJson(
                open=("<|tool_call_begin|>",),
                between=("<|tool_call_argument_begin|>",),
                close=("<|tool_call_end|>",),
                name=r"(?:functions\.)?(.+?)(?::\d+)?",
            ),
        ),
        ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    ),
    "glm45": ToolCallGrammar((_ARGUMENT_TAGS,), ("<tool_call>",), ("</tool_call>",)),
    "minimax_m2": ToolCallGrammar(
        (
            Tagged(
                open=("<invoke name=",),
                open_end=(">",),
                key="<parameter name=",
                key_end=">",
                value_end="</parameter>",
                close=("</invoke>",),
            ),
        ),
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
    ),
    "nemotron_deci": ToolCallGrammar((JsonObjects(),), ("<TOOLCALL>",), ("</TOOLCALL>",)),
    "gemma4": ToolCallGrammar(
        (KeyedLiterals(open=("<|tool_call>call:",), quote='<|"|>'),), end=("<tool_call|>",)
    ),
    "functiongemma": ToolCallGrammar(
        (KeyedLiterals(open=("<start_function_call>call:",), quote="<escape>"),),
        end=("<end_function_call>",),
    ),
    "gemma3": ToolCallGrammar((Pythonic(),), ("```tool_code\n",), ("```",), separators=(",", "\n")),
    "phi4": ToolCallGrammar((JsonObjects(),), ("functools",)),
    "phi4_mini": ToolCallGrammar((JsonObjects(),), ("<|tool_call|>",), ("<|/tool_call|>",)),
    "granite": ToolCallGrammar(
        (JsonObjects(),), ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")
    ),
    "step3": ToolCallGrammar(
        (
            Tagged(
                open=("<steptml:invoke name=",),
                open_end=(">",),
                key="<steptml:parameter name=",
                key_end=">",
                value_end="</steptml:parameter>",
                close=("</steptml:invoke>",),
                before=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
                after=("<｜tool_call_end｜>",),
            ),
        ),
        ("<｜tool_calls_begin｜>",),
        ("<｜tool_calls_end｜>",),
    ),
    "jamba": ToolCallGrammar((JsonObjects(),), ("<tool_calls>",), ("</tool_calls>",)),
    "olmo3": ToolCallGrammar(
        (Pythonic(bare=False),), ("<function_calls>",), ("</function_calls>",), ("\n", ",")
    ),
    "lfm2": ToolCallGrammar(
        (Pythonic(bare=False),), ("<|tool_call_start|>",), ("<|tool_call_end|>",)
    ),
}

TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "nemotron_nano": "qwen3_coder",
    "nemotron": "nemotron_deci",
    "llama4_pythonic": "pythonic",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v3_2",
    "glm47": "glm45",
    "gemma": "gemma4",
    "granite4": "hermes",
    "openai": "harmony",
    "gpt_oss": "harmony",
}

# --- thinking ----------------------------------------------------------------------------------

REASONING_PARSERS: dict[str, ReasoningGrammar] = {
    "basic": ReasoningGrammar(),
    "qwen3": ReasoningGrammar(calls_end_it=True),
    "deepseek_r1": ReasoningGrammar(forced=True),
    "kimi": ReasoningGrammar(("◁think▷",), ("◁/think▷",)),
    "kimi_k25": ReasoningGrammar(forced=True, calls_end_it=True),
    "glm45": ReasoningGrammar(calls_end_it=True),
    "minimax_m2": ReasoningGrammar(forced=True, calls_end_it=True),
    "nemotron_nano": ReasoningGrammar(forced=True),
    "step3": ReasoningGrammar(forced=True),
    "mistral": ReasoningGrammar(("[THINK]",), ("[/THINK]",)),
    "granite": ReasoningGrammar(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "gemma4": ReasoningGrammar(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",)),
    "phi4": ReasoningGrammar(),
    "seed_oss": ReasoningGrammar(("<seed:think>",), ("</seed:think>",)),
}

REASONING_ALIASES = {
    "deepseek_v3": "basic",
    "deepseek_v3_1": "basic",
    "deepseek_v3_2": "basic",
    "deepseek_v4": "basic",
    "kimi_k2": "kimi_k25",
    "glm47": "glm45",
    "nemotron": "basic",
    "nemotron_deci": "basic",
    "nemotron3": "nemotron_nano",
    "openai": "harmony",
    "gpt_oss": "harmony",
    "gemma": "gemma4",
}

# --- detection of a model's family -------------------------------------------------------------

# A chat template identifies the family more reliably than a name. An entry matches if the template
# contains all its strings; the first match wins.
TEMPLATE_SIGNS: list[tuple[tuple[str, ...], str | None, str | None]] = [
    (("<|tool_calls_section_begin|>",), "kimi_k2", "kimi_k25"),
    (("<|channel|>analysis",), "harmony", "harmony"),
    (("｜DSML｜",), "deepseek_v3_2", "basic"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3", "basic"),
    (("<｜tool▁sep｜>",), "deepseek_v3_1", "basic"),
    (("<steptml:invoke",), "step3", "step3"),
    (("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    (("]<]minimax[>[",), None, None),
    (("<arg_key>",), "glm45", "glm45"),
    (("<seed:tool_call>",), "seed_oss", "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder", "qwen3"),
    (("<function=",), "functionary", None),
    (("<TOOLCALL>",), "nemotron_deci", "basic"),
    (("[TOOL_CALLS]",), "mistral", "mistral"),
    (("<|tool_call>call:",), "gemma4", "gemma4"),
    (("<start_function_call>",), "functiongemma", None),
    (("<|tool_call_start|>",), "lfm2", "basic"),
    (("<tool_calls>",), "jamba", "basic"),
    (("<tool_call>",), "hermes", "qwen3"),
    (("<|python_start|>",), "pythonic", None),
    (("<|python_tag|>",), "llama3_json", None),
    (("<function_calls>",), "olmo3", "basic"),
    (("<think>",), None, "basic"),
]

# Patterns searched in the lower-case model name; the first match wins.
NAME_SIGNS: list[tuple[str, str | None, str | None]] = [
    (r"kimi-?k2(\.5|.*thinking)", "kimi_k2", "kimi_k25"),
    (r"kimi-?k2", "kimi_k2", None),
    (r"kimi", None, "kimi"),
    (r"gpt-?oss", "harmony", "harmony"),
    (r"deepseek-?v(3\.2|4)", "deepseek_v3_2", "basic"),
    (r"deepseek-?v3\.1", "deepseek_v3_1", "basic"),
    (r"deepseek-?r1", "deepseek_v3", "deepseek_r1"),
    (r"deepseek-?v3", "deepseek_v3", "basic"),
    (r"qwen3\.[5-9]|qwen3-?coder", "qwen3_coder", "qwen3"),
    (r"qwen|qwq|hermes", "hermes", "qwen3"),
    (r"glm-?[45]", "glm45", "glm45"),
    (r"minimax-?m2", "minimax_m2", "minimax_m2"),
    (r"nemotron.*(nano|3)", "qwen3_coder", "nemotron_nano"),
    (r"nemotron", "nemotron_deci", "basic"),
    (r"llama-?4", "pythonic", None),
    (r"functionary.*3\.1", "functionary", None),
    (r"llama-?3", "llama3_json", None),
    (r"magistral|mistral|devstral|ministral|codestral", "mistral", "mistral"),
    (r"functiongemma", "functiongemma", None),
    (r"gemma-?4", "gemma4", "gemma4"),
    (r"gemma-?3", "gemma3", None),
    (r"phi-?4-mini", "phi4_mini", None),
    (r"phi-?4", "phi4", "phi4"),
    (r"granite", "granite", "granite"),
    (r"seed-?oss", "seed_oss", "seed_oss"),
    (r"step-?3\.5", "qwen3_coder", "step3"),
    (r"step-?3", "step3", "step3"),
    (r"jamba", "jamba", None),
    (r"olmo-?3", "olmo3", "basic"),
    (r"lfm2", "lfm2", None),
]


def by_template(source: str) -> tuple[str | None, str | None] | None:
    """Names of the (tool-call, reasoning) parsers of a chat template; None if it is unknown."""
    for signs, tool, reasoning in TEMPLATE_SIGNS:
        if all(sign in source for sign in signs):
            return tool, reasoning if _thinks(source, reasoning) else None
    return None


def by_name(model: str) -> tuple[str | None, str | None]:
    """Names of the (tool-call, reasoning) parsers of a model's name."""
    for pattern, tool, reasoning in NAME_SIGNS:
        if re.search(pattern, model.lower()):
            return tool, reasoning
    return None, None


def _thinks(source: str, name: str | None) -> bool:
    """False if the parser assumes thinking but the template never mentions its markers."""
    grammar = REASONING_PARSERS.get(name or "")
    if grammar is None or not grammar.forced:
        return True
    return any(marker in source for marker in (*grammar.begin, *grammar.end))
