"""Families that write calls as JSON, in Python's syntax, or in one like it."""

from kvmesh.frontend.dialects.families.frames import (
    APERTUS_TEXT,
    COHERE_TEXT,
    GIGACHAT_TEXT,
    HUNYUAN_TEXT,
    RESPONSE_TEXT,
)
from kvmesh.frontend.dialects.grammar import (
    JsonObjects,
    KeyedLiterals,
    NamedJson,
    NameKeys,
    Pythonic,
    ToolCallGrammar,
)

_DEEPSEEK_END = "<｜tool▁call▁end｜>"
JSON_CALLS: dict[str, ToolCallGrammar] = {
    "hermes": ToolCallGrammar((JsonObjects(),), ("<tool_call>",), ("</tool_call>",)),
    "llama3_json": ToolCallGrammar((JsonObjects(bare=True),), ("<|python_tag|>",)),
    "functionary": ToolCallGrammar(
        (NamedJson(open=("<function=",), between=(">",), close=("</function>",)),)
    ),
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
    "nemotron_deci": ToolCallGrammar((JsonObjects(),), ("<TOOLCALL>",), ("</TOOLCALL>",)),
    "phi4": ToolCallGrammar((JsonObjects(),), ("functools",)),
    "phi4_mini": ToolCallGrammar(
        (JsonObjects(),), ("<|tool_call|>", "functools"), ("<|/tool_call|>",)
    ),
    "granite": ToolCallGrammar(
        (JsonObjects(),), ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")
    ),
    "jamba": ToolCallGrammar((JsonObjects(),), ("<tool_calls>",), ("</tool_calls>",)),
    "cohere_command": ToolCallGrammar(
        (JsonObjects(names=("tool_name", "name")),),
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        frame=COHERE_TEXT,
    ),
    "apertus": ToolCallGrammar(
        (NameKeys(),),
        ("<|tools_prefix|>",),
        ("<|tools_suffix|>",),
        frame=APERTUS_TEXT,
    ),
    "hunyuan_a13b": ToolCallGrammar(
        (JsonObjects(),), ("<tool_calls>",), ("</tool_calls>",), frame=HUNYUAN_TEXT
    ),
    "ernie45": ToolCallGrammar(
        (JsonObjects(),), ("<tool_call>",), ("</tool_call>",), frame=RESPONSE_TEXT
    ),
    "internlm": ToolCallGrammar(
        (JsonObjects(),),
        ("<|action_start|> <|plugin|>", "<|action_start|><|plugin|>"),
        ("<|action_end|>",),
    ),
    # A list alone, or in any of the marks that its base models were trained on.
    "xlam": ToolCallGrammar(
        (JsonObjects(bare=True),),
        ("```json", "```", "<tool_call>", "[TOOL_CALLS]"),
        ("```", "</tool_call>"),
    ),
    "gigachat3": ToolCallGrammar(
        (JsonObjects(),),
        ("<|function_call|>", "function call<|role_sep|>"),
        ("<|message_sep|>",),
        frame=GIGACHAT_TEXT,
    ),
    "granite_20b_fc": ToolCallGrammar((JsonObjects(),), ("<function_call>",)),
    "plamo3": ToolCallGrammar(
        (
            NamedJson(
                open=("<|plamo:begin_tool_request:plamo|>", "<|plamo:begin_tool_name:plamo|>"),
                before=("<|plamo:begin_tool_name:plamo|>",),
                between=(
                    "<|plamo:end_tool_name:plamo|>",
                    "<|plamo:begin_tool_arguments:plamo|>",
                    "<|plamo:constrain|>json<|plamo:msg|>",
                ),
                close=(
                    "<|plamo:end_tool_arguments:plamo|>",
                    "<|plamo:end_tool_request:plamo|>",
                ),
            ),
        ),
        ("<|plamo:begin_tool_requests:plamo|>",),
        ("<|plamo:end_tool_requests:plamo|>",),
    ),
}
LITERAL_CALLS: dict[str, ToolCallGrammar] = {
    "pythonic": ToolCallGrammar((Pythonic(),), ("<|python_start|>",), ("<|python_end|>",)),
    "gemma4": ToolCallGrammar(
        (KeyedLiterals(open=("<|tool_call>call:", "<|tool_call>:"), quote='<|"|>'),),
        end=("<tool_call|>",),
    ),
    "functiongemma": ToolCallGrammar(
        (KeyedLiterals(open=("<start_function_call>call:",), quote="<escape>"),),
        end=("<end_function_call>",),
    ),
    "gemma3": ToolCallGrammar((Pythonic(),), ("```tool_code\n",), ("```",), separators=(",", "\n")),
    "olmo3": ToolCallGrammar(
        (Pythonic(bare=False),), ("<function_calls>",), ("</function_calls>",), ("\n", ",")
    ),
    "lfm2": ToolCallGrammar(
        (JsonObjects(), Pythonic(bare=False)), ("<|tool_call_start|>",), ("<|tool_call_end|>",)
    ),
}
