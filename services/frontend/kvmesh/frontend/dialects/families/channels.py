"""Families whose output is a sequence of messages on channels."""

from kvmesh.frontend.dialects.grammar import (
    Arguments,
    ChannelGrammar,
    JsonObjects,
    NamedJson,
    Tagged,
)

# The first word of a header may be the recipient of its message.
_TO = r"\s*(?:t|to|to=[^\s<]*)?\s*"

CHANNELS: dict[str, ChannelGrammar] = {
    "muse": ChannelGrammar(
        start=("<|start|>assistant",),
        mark=("<|message|>",),
        end=("<|eom|>", "<|eot|>"),
        header=_TO,
        thinking=r"(?:to=self)?\s*<\|message\|>",
        text=r"to=(?:user|commentary|developer)\s*<\|message\|>",
        calls=r"to=\S+\s*<\|message\|>",
        forms=(
            Tagged(
                open=("<atem:invoke name=",),
                open_end=(">",),
                key="<atem:parameter name=",
                key_end=">",
                value_end="</atem:parameter>",
                close=("</atem:invoke>",),
                before=("<atem:function_calls>",),
                after=("</atem:function_calls>",),
            ),
        ),
        recipient="to=",
    ),
    "inkling": ChannelGrammar(
        start=("<|message_model|>",),
        mark=("<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
        end=("<|end_message|>", "<|content_model_end_sampling|>"),
        header=r"[\w.:\-]*\s*",
        thinking=r"<\|content_thinking\|>",
        text=r"<\|content_text\|>",
        calls=r".*<\|content_invoke_tool_json\|>",
        forms=(JsonObjects(arguments=("args", "arguments")),),
    ),
    "beam": ChannelGrammar(
        start=("<|start|>assistant",),
        mark=("<|message|>",),
        end=("<|end|>", "<|call|>", "<|return|>"),
        header=_TO + r"(?:<[^\n]*)?",
        thinking=r"<\|channel\|>analysis\s*<\|message\|>",
        text=r"<\|channel\|>(?:final|commentary)\s*<\|message\|>",
        calls=r"to=(?P<name>[^\s<]+)\s*<\|channel\|>.*",
        forms=(
            Tagged(
                open=("",),
                open_end=("",),
                key="<rfl:parameter name=",
                key_end=">",
                value_end="</rfl:parameter>",
                padding="\n",
                named=False,
            ),
        ),
    ),
    "solar_open": ChannelGrammar(
        start=("<|begin|>assistant",),
        mark=("<|think|>", "<|content|>", "<|tool_calls|>"),
        end=("<|end|>", "<|calls|>"),
        header=r"\s*",
        thinking=r"<\|think\|>",
        text=r"<\|content\|>",
        calls=r"<\|tool_calls\|>",
        forms=(
            NamedJson(
                open=("<|tool_call:begin|>",),
                id_end="<|tool_call:name|>",
                between=("<|tool_call:args|>",),
                close=("<|tool_call:end|>",),
            ),
        ),
    ),
    # Its marks are plain text, as of an interactive Python session.
    "functionary_v3_2": ChannelGrammar(
        start=(">>>",),
        mark=("\n",),
        end=(),
        header=r"[\w.\-]*",
        thinking=r"(?!)",
        text=r"all\n",
        calls=r"(?P<name>[\w.\-]+)\n",
        forms=(Arguments(),),
        known=True,
    ),
}
