"""Selection of a model's parsers."""

import pytest
from unit.frontend.dialects.recorded import from_source, template

from kvmesh.frontend.dialects import UnknownParser, choose_grammar, preview_output
from kvmesh.frontend.dialects.families import (
    ARCHITECTURES,
    CHANNELS,
    NAME_SIGNS,
    REASONING_ALIASES,
    REASONING_PARSERS,
    TEMPLATE_SIGNS,
    TOOL_ALIASES,
    TOOL_PARSERS,
    by_architecture,
)
from kvmesh.frontend.dialects.output import HARMONY, parser_names


@pytest.mark.parametrize(
    ("model", "tool", "reasoning"),
    [
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "hermes", "qwen3"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3_coder", "qwen3"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3_json", None),
        ("meta-llama/Llama-4-Maverick-17B-128E", "pythonic", None),
        ("mistralai/Devstral-Small-2507", "mistral", "mistral"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek_v3", "deepseek_r1"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3", "basic"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek_v3_1", "basic"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek_v3_2", "qwen3"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi_k2", None),
        ("moonshotai/Kimi-K2-Thinking", "kimi_k2", "kimi_k25"),
        ("zai-org/GLM-4.7", "glm45", "glm45"),
        ("MiniMaxAI/MiniMax-M2.1", "minimax_m2", "minimax_m2"),
        ("openai/gpt-oss-120b", "harmony", "harmony"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", "qwen3_coder", "nemotron_nano"),
        ("google/gemma-3-27b-it", "gemma3", None),
        ("microsoft/Phi-4-mini-instruct", "phi4_mini", None),
        ("ibm-granite/granite-3.3-8b-instruct", "granite", "granite"),
        ("stepfun-ai/step3", "step3", "step3"),
        ("moonshotai/Kimi-K3", "kimi_k3", "kimi_k3"),
        ("MiniMaxAI/MiniMax-M3", "minimax_m3", "minimax_m3"),
        ("deepseek-ai/DeepSeek-V4.1", "deepseek_v4_1", "qwen3"),
        ("CohereLabs/c4ai-command-r7b-12-2024", "cohere_command", "cohere_command"),
        ("tencent/Hy3-preview", "hy_v3", "hy_v3"),
        ("ibm-granite/granite-4.0-h-small", "hermes", None),
        ("Salesforce/Llama-xLAM-2-8b-fc-r", "xlam", "basic"),
        ("meetkai/functionary-medium-v3.2", "functionary_v3_2", None),
        ("somebody/novel-7b", None, None),
    ],
)
def test_a_name_identifies_the_family(model: str, tool: str | None, reasoning: str | None) -> None:
    grammar = choose_grammar(model)
    assert (grammar.tool_parser, grammar.reasoning_parser) == (tool, reasoning)


def test_the_card_overrides_the_template_and_the_template_the_name() -> None:
    chatml = template("chatml")
    assert choose_grammar("mistral-small", chatml).tool_parser == "hermes"
    chosen = choose_grammar("mistral-small", chatml, tool_parser="glm47", reasoning_parser="none")
    assert (chosen.tool_parser, chosen.reasoning_parser) == ("glm45", None)


def test_auto_leaves_the_choice_to_the_model() -> None:
    for name in ("auto", "hf", "response-template"):
        chosen = choose_grammar("m", template("chatml"), tool_parser=name, reasoning_parser=name)
        assert chosen == choose_grammar("m", template("chatml"))


def test_hyphens_and_upper_case_make_no_other_name() -> None:
    chosen = choose_grammar("m", tool_parser="Kimi-K3", reasoning_parser="GPT-OSS")
    assert (chosen.tool_parser, chosen.reasoning_parser) == ("kimi_k3", "harmony")


def test_an_architecture_identifies_the_family() -> None:
    assert by_architecture(["KimiK3ForConditionalGeneration"]) == ("kimi_k3", "kimi_k3")
    assert by_architecture(["LlamaForCausalLM"]) is None


def test_the_demo_model_has_its_parsers() -> None:
    grammar = choose_grammar("kvmesh-demo", template("demo"))
    assert (grammar.tool_parser, grammar.reasoning_parser) == ("hermes", "qwen3")


def test_a_template_without_tools_gets_the_parser_of_its_instructions() -> None:
    assert choose_grammar("gemma-3-27b", template("gemma")).tool_parser == "hermes"


def test_forced_thinking_needs_a_template_that_thinks() -> None:
    calls = "<|tool_calls_section_begin|>"
    assert choose_grammar("kimi", from_source(calls)).reasoning_parser is None
    assert choose_grammar("kimi", from_source(f"{calls}<think>")).reasoning_parser == "kimi_k25"


def test_unknown_names_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(UnknownParser, match=r"unknown tool-call parser 'hermés'.*hermes") as error:
        choose_grammar("m", tool_parser="hermés")
    assert "qwen3_coder" in error.value.known
    with pytest.raises(UnknownParser, match="unknown reasoning parser"):
        choose_grammar("m", reasoning_parser="hermes")


def test_every_name_in_the_tables_is_defined() -> None:
    tools = {*TOOL_PARSERS, *CHANNELS, HARMONY, None}
    reasonings = {*REASONING_PARSERS, *CHANNELS, HARMONY, None}
    for *_, tool, reasoning in [*TEMPLATE_SIGNS, *NAME_SIGNS, *ARCHITECTURES.values()]:
        assert tool in tools
        assert reasoning in reasonings
    assert set(TOOL_ALIASES.values()) <= {*tools, "auto"}
    assert set(REASONING_ALIASES.values()) <= {*reasonings, "auto"}
    assert not {*TOOL_ALIASES} & tools
    assert not {*REASONING_ALIASES} & reasonings
    assert {"qwen", "glm47", "harmony", "none"} <= set(parser_names()[0])


def test_the_grammar_uses_its_special_tokens() -> None:
    older = choose_grammar("kimi-k2")
    assert older.uses("<|tool_call_begin|>")
    assert not older.uses("<|im_end|>")
    assert choose_grammar("deepseek-v3").uses("<｜tool▁sep｜>")
    assert choose_grammar("gpt-oss").uses("<|channel|>")
    kimi = choose_grammar("kimi-k3")
    assert all(kimi.uses(token) for token in ("<|open|>", "<|close|>", "<|sep|>"))
    assert not kimi.uses("<|end_of_msg|>")
    for token in ("<|START_ACTION|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_TEXT|>"):
        assert choose_grammar("command-a").uses(token)
    assert all(choose_grammar("muse").uses(token) for token in ("<|start|>", "<|message|>"))
    assert choose_grammar("inkling").uses("<|content_thinking|>")
    assert not choose_grammar("inkling").uses("<|content_image|>")
    assert not choose_grammar("novel").uses("<tool_call>")


def test_the_preview_shows_the_parts() -> None:
    raw = '<think>hm</think>Hi.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert (
        preview_output("hermes", raw) == '[thinking]\nhm\n\n[text]\nHi.\n\n[call f]\n{\n  "a": 1\n}'
    )
    assert preview_output("granite", "Here is my thought process:\nx\nHere is my response:\ny") == (
        "[thinking]\nx\n\n[text]\ny"
    )
    with pytest.raises(UnknownParser):
        preview_output("nothing", raw)
