"""Families that write one tag per argument."""

from msgspec.structs import replace

from kvmesh.frontend.dialects.families.frames import GIGACHAT_TEXT, KIMI_K3_TEXT
from kvmesh.frontend.dialects.grammar import Elements, JsonObjects, Tagged, ToolCallGrammar

# Hunyuan's tokenizers add one of these to each name of a tag.
HUNYUAN_SUFFIXES = ("", ":opensource", ":6124c78e")

_FUNCTION_TAGS = Tagged(
    open=("<function=",),
    open_end=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    close=("</function>",),
    padding="\n",
)
_VERBATIM_TAGS = replace(_FUNCTION_TAGS, padding="")
_ARGUMENT_TAGS = Tagged(
    open=("",),
    open_end=("",),
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
)
_INVOKE_TAGS = Tagged(
    open=("<invoke name=",),
    open_end=(">",),
    key="<parameter name=",
    key_end=">",
    value_end="</parameter>",
    close=("</invoke>",),
)
_IFM_CALL = ("<ifm|tool_call>",), ("</ifm|tool_call>",)


def _dsml(name: str, space: str = "") -> Tagged:
    """Calls in DeepSeek's markup, or in one named otherwise; each argument states its type."""
    tag = f"｜{name}｜{space}"
    return Tagged(
        open=(f"<{tag}invoke name=",),
        open_end=(">",),
        key=f"<{tag}parameter name=",
        key_end=">",
        value_end=f"</{tag}parameter>",
        close=(f"</{tag}invoke>",),
    )


def _hunyuan(suffix: str) -> Tagged:
    return Tagged(
        open=(f"<tool_call{suffix}>",),
        open_end=(f"<tool_sep{suffix}>", ""),
        key=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        close=(f"</tool_call{suffix}>",),
    )


TAGGED_CALLS: dict[str, ToolCallGrammar] = {
    "qwen3_coder": ToolCallGrammar((_FUNCTION_TAGS,), ("<tool_call>",), ("</tool_call>",)),
    # V4 calls the section tool_calls.
    "deepseek_v3_2": ToolCallGrammar(
        (_dsml("DSML"),),
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    "deepseek_v4_1": ToolCallGrammar(
        (_dsml("DSML", " "),), ("<｜DSML｜ calls>",), ("</｜DSML｜ calls>",)
    ),
    "gigachat3_5": ToolCallGrammar(
        (_dsml("GCML"),),
        ("<｜GCML｜tool_calls>",),
        ("</｜GCML｜tool_calls>",),
        frame=GIGACHAT_TEXT,
    ),
    "glm45": ToolCallGrammar((_ARGUMENT_TAGS,), ("<tool_call>",), ("</tool_call>",)),
    "minimax_m2": ToolCallGrammar(
        (_INVOKE_TAGS,), ("<minimax:tool_call>",), ("</minimax:tool_call>",)
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
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        ("<｜tool_calls_end｜>",),
    ),
    "seed_oss": ToolCallGrammar((_VERBATIM_TAGS,), ("<seed:tool_call>",), ("</seed:tool_call>",)),
    "mimo": ToolCallGrammar((_VERBATIM_TAGS,), ("<tool_call>",), ("</tool_call>",)),
    "dots": ToolCallGrammar(
        (_INVOKE_TAGS, JsonObjects()), ("<dots_function_call>",), ("</dots_function_call>",)
    ),
    "minicpm5": ToolCallGrammar(
        (
            Tagged(
                open=("<function name=",),
                open_end=(">",),
                key="<param name=",
                key_end=">",
                value_end="</param>",
                close=("</function>",),
                wrap=("<![CDATA[", "]]>"),
            ),
        )
    ),
    "iquest_q1": ToolCallGrammar(
        (_ARGUMENT_TAGS,), ("<iquest_tool_call>",), ("</iquest_tool_call>",)
    ),
    "longcat": ToolCallGrammar(
        (
            JsonObjects(),
            Tagged(
                open=("",),
                open_end=("",),
                key="<longcat_arg_key>",
                key_end="</longcat_arg_key>",
                value="<longcat_arg_value>",
                value_end="</longcat_arg_value>",
            ),
        ),
        ("<longcat_tool_call>",),
        ("</longcat_tool_call>",),
    ),
    "hy_v3": ToolCallGrammar(
        tuple(_hunyuan(suffix) for suffix in HUNYUAN_SUFFIXES),
        tuple(f"<tool_calls{suffix}>" for suffix in HUNYUAN_SUFFIXES),
        tuple(f"</tool_calls{suffix}>" for suffix in HUNYUAN_SUFFIXES),
    ),
    "k2_horizon": ToolCallGrammar(
        (
            JsonObjects(open=_IFM_CALL[0], close=_IFM_CALL[1]),
            Tagged(
                open=_IFM_CALL[0],
                open_end=("",),
                key="<ifm|arg_key>",
                key_end="</ifm|arg_key>",
                kind=("<ifm|arg_type>", "</ifm|arg_type>"),
                value="<ifm|arg_value>",
                value_end="</ifm|arg_value>",
                close=_IFM_CALL[1],
            ),
        ),
        ("<ifm|tool_calls>",),
        ("</ifm|tool_calls>",),
    ),
    "kimi_k3": ToolCallGrammar(
        (
            Tagged(
                open=("<|open|>call tool=",),
                open_end=("<|sep|>",),
                key="<|open|>argument key=",
                key_end="<|sep|>",
                value_end="<|close|>argument<|sep|>",
                close=("<|close|>call<|sep|>",),
                escaped=True,
                whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
            ),
        ),
        ("<|open|>tools<|sep|>",),
        ("<|close|>tools<|sep|>",),
        frame=KIMI_K3_TEXT,
    ),
    "minimax_m3": ToolCallGrammar(
        (
            Elements(
                mark="]<]minimax[>[",
                open=("]<]minimax[>[<invoke name=",),
                open_end=(">",),
                close=("]<]minimax[>[</invoke>",),
            ),
        ),
        ("]<]minimax[>[<tool_call>",),
        ("]<]minimax[>[</tool_call>",),
    ),
}
