"""Thinking of the families, and what is around the text behind it."""

from kvmesh.frontend.dialects.families.frames import (
    APERTUS_TEXT,
    APRIEL_TEXT,
    COHERE_TEXT,
    HUNYUAN_TEXT,
    KIMI_K3_TEXT,
    MINIMAX_M3_TEXT,
    RESPONSE_TEXT,
)
from kvmesh.frontend.dialects.families.tagged_calls import HUNYUAN_SUFFIXES
from kvmesh.frontend.dialects.grammar import ReasoningGrammar

_IFM_EFFORTS = ("think", "think_fast", "think_faster")

REASONING_PARSERS: dict[str, ReasoningGrammar] = {
    "basic": ReasoningGrammar(),
    "qwen3": ReasoningGrammar(calls_end_it=True),
    "deepseek_r1": ReasoningGrammar(forced=True),
    "kimi": ReasoningGrammar(("◁think▷",), ("◁/think▷",)),
    "kimi_k25": ReasoningGrammar(forced=True, calls_end_it=True),
    "glm45": ReasoningGrammar(calls_end_it=True),
    "minimax_m2": ReasoningGrammar(forced=True, calls_end_it=True),
    "nemotron_nano": ReasoningGrammar(forced=True, calls_end_it=True),
    "step3": ReasoningGrammar(forced=True, calls_end_it=True),
    "mistral": ReasoningGrammar(("[THINK]",), ("[/THINK]",), calls_end_it=True),
    "granite": ReasoningGrammar(
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        frame=RESPONSE_TEXT,
    ),
    "gemma4": ReasoningGrammar(
        ("<|channel>thought\n", "<|channel>thought", "<|channel>"),
        ("<channel|>",),
        calls_end_it=True,
    ),
    "phi4": ReasoningGrammar(),
    "cohere_command": ReasoningGrammar(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>", *COHERE_TEXT.open),
        calls_end_it=True,
        frame=COHERE_TEXT,
    ),
    "apertus": ReasoningGrammar(
        ("<|inner_prefix|>",), ("<|inner_suffix|>",), calls_end_it=True, frame=APERTUS_TEXT
    ),
    "hunyuan_a13b": ReasoningGrammar(frame=HUNYUAN_TEXT),
    "ernie45": ReasoningGrammar(forced=True, calls_end_it=True, frame=RESPONSE_TEXT),
    "hy_v3": ReasoningGrammar(
        tuple(f"<think{suffix}>" for suffix in HUNYUAN_SUFFIXES),
        tuple(f"</think{suffix}>" for suffix in HUNYUAN_SUFFIXES),
        calls_end_it=True,
    ),
    "k2_horizon": ReasoningGrammar(
        tuple(f"<ifm|{effort}>" for effort in _IFM_EFFORTS),
        tuple(f"</ifm|{effort}>" for effort in _IFM_EFFORTS),
        calls_end_it=True,
    ),
    "kimi_k3": ReasoningGrammar(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>", *KIMI_K3_TEXT.open),
        calls_end_it=True,
        frame=KIMI_K3_TEXT,
    ),
    "longcat": ReasoningGrammar(("<longcat_think>",), ("</longcat_think>",), calls_end_it=True),
    "minimax_m3": ReasoningGrammar(
        ("<mm:think>",), ("</mm:think>",), calls_end_it=True, frame=MINIMAX_M3_TEXT
    ),
    "plamo3": ReasoningGrammar(
        ("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",), calls_end_it=True
    ),
    "seed_oss": ReasoningGrammar(("<seed:think>",), ("</seed:think>",), calls_end_it=True),
    "apriel": ReasoningGrammar(
        ("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), frame=APRIEL_TEXT
    ),
}
