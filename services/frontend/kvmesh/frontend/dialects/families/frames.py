"""Markers around the visible text of families that frame it."""

from kvmesh.frontend.dialects.grammar import Frame

COHERE_TEXT = Frame(("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>"))
# Its calls may stand inside thinking, which then ends behind them.
APERTUS_TEXT = Frame(close=("<|inner_suffix|>",))
# The second marker is the assistant's name, which stands before calls.
HUNYUAN_TEXT = Frame(("<answer>", "助手："), ("</answer>",))
RESPONSE_TEXT = Frame(("<response>",), ("</response>",))
GIGACHAT_TEXT = Frame(close=("<|message_sep|>",))
KIMI_K3_TEXT = Frame(
    ("<|open|>response<|sep|>",), ("<|close|>response<|sep|>", "<|close|>message<|sep|>")
)
# An answer without thinking may begin with the end of thinking.
MINIMAX_M3_TEXT = Frame(("</mm:think>",))
APRIEL_TEXT = Frame(close=("[END FINAL RESPONSE]",))
