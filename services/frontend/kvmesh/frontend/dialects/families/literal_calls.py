"""Families that write calls in Python's syntax or one like it."""

from kvmesh.frontend.dialects.grammar import JsonObjects, KeyedLiterals, Pythonic, ToolCallGrammar

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
