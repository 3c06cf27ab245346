"""Families that write arguments as JSON."""

from kvmesh.frontend.dialects.families.frames import (
    APERTUS_TEXT,
    COHERE_TEXT,
    GIGACHAT_TEXT,
    HUNYUAN_TEXT,
    RESPONSE_TEXT,
)
from kvmesh.frontend.dialects.grammar import JsonObjects, NamedJson, NameKeys, ToolCallGrammar

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
