"""Detection of a model's family."""

import re
from collections.abc import Iterable

from kvmesh.frontend.dialects.families.thinking import REASONING_PARSERS

# A chat template identifies the family more reliably than a name. An entry matches if the template
# contains all its strings; the first match wins.
TEMPLATE_SIGNS: list[tuple[tuple[str, ...], str | None, str | None]] = [
    (("<|tool_calls_section_begin|>",), "kimi_k2", "kimi_k25"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3", "kimi_k3"),
    (("<rfl:parameter",), "beam", "beam"),
    (("<|channel|>analysis",), "harmony", "harmony"),
    (("<atem:",), "muse", "muse"),
    (("<|content_invoke_tool_json|>",), "inkling", "inkling"),
    (("<|tool_call:begin|>",), "solar_open", "solar_open"),
    ((">>>all",), "functionary_v3_2", None),
    (("<|START_ACTION|>",), "cohere_command", "cohere_command"),
    (("<|START_RESPONSE|>",), "cohere_command", "cohere_command"),
    (("<|tools_prefix|>",), "apertus", "apertus"),
    (("<|plugin|>",), "internlm", "qwen3"),
    (("plamo:begin_tool_request",), "plamo3", "plamo3"),
    (("<ifm|tool_call>",), "k2_horizon", "k2_horizon"),
    (("｜GCML｜",), "gigachat3_5", "deepseek_r1"),
    (("<|role_sep|>", "function call"), "gigachat3", None),
    (("<|role_sep|>", "<|function_call|>"), "gigachat3", None),
    (("｜DSML｜ calls",), "deepseek_v4_1", "qwen3"),
    (("｜DSML｜",), "deepseek_v3_2", "qwen3"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3", "basic"),
    (("<｜tool▁sep｜>",), "deepseek_v3_1", "basic"),
    (("<steptml:invoke",), "step3", "step3"),
    (("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    (("]<]minimax[>[",), "minimax_m3", "minimax_m3"),
    (("<tool_calls", "<arg_key"), "hy_v3", "hy_v3"),
    (("<longcat_tool_call>",), "longcat", "longcat"),
    (("<iquest_tool_call>",), "iquest_q1", "kimi_k25"),
    (("<dots_function_call>",), "dots", "qwen3"),
    (("<arg_key>",), "glm45", "glm45"),
    (("<seed:tool_call>",), "seed_oss", "seed_oss"),
    (("<function name=", "<param name="), "minicpm5", "qwen3"),
    (("<function=", "<parameter="), "qwen3_coder", "qwen3"),
    (("<function=",), "functionary", None),
    (("<TOOLCALL>",), "nemotron_deci", "basic"),
    (("[TOOL_CALLS]",), "mistral", "mistral"),
    (("<|tool_call>call:",), "gemma4", "gemma4"),
    (("<start_function_call>",), "functiongemma", None),
    (("<|tool_call_start|>",), "lfm2", "basic"),
    (("<|tool_response_start|>",), "lfm2", "basic"),
    (("[BEGIN FINAL RESPONSE]",), "jamba", "apriel"),
    (("<tool_calls>", "助手"), "hunyuan_a13b", "hunyuan_a13b"),
    (("<tool_calls>",), "jamba", "basic"),
    (("<tool_call>", "<response>"), "ernie45", "ernie45"),
    (("<|tool_call|>",), "granite", "granite"),
    (("<function_call>", "<function_response>"), "granite_20b_fc", None),
    (("<tool_call>",), "hermes", "qwen3"),
    (("<|python_start|>",), "pythonic", None),
    (("func_name1(param",), "pythonic", None),
    (("make calls in a single JSON array",), "xlam", "basic"),
    (("<|python_tag|>",), "llama3_json", None),
    (("<function_calls>",), "olmo3", "basic"),
    (("<think></think>", "<response></response>"), "granite", "granite"),
    (("<think>",), None, "basic"),
]

# Patterns searched in the lower-case model name; the first match wins.
NAME_SIGNS: list[tuple[str, str | None, str | None]] = [
    (r"kimi-?k3", "kimi_k3", "kimi_k3"),
    (r"kimi-?k2(\.[5-9]|.*thinking)", "kimi_k2", "kimi_k25"),
    (r"kimi-?(k2|linear)", "kimi_k2", None),
    (r"kimi", None, "kimi"),
    (r"gpt-?oss", "harmony", "harmony"),
    (r"deepseek-?v4\.1", "deepseek_v4_1", "qwen3"),
    (r"deepseek-?v(3\.2|4)", "deepseek_v3_2", "qwen3"),
    (r"deepseek-?v3\.1", "deepseek_v3_1", "basic"),
    (r"deepseek-?r1", "deepseek_v3", "deepseek_r1"),
    (r"deepseek-?v3", "deepseek_v3", "basic"),
    (r"qwen3\.[5-9]|qwen3-?coder", "qwen3_coder", "qwen3"),
    (r"command-?(a|r7b)", "cohere_command", "cohere_command"),
    (r"qwen|qwq|hermes|trinity", "hermes", "qwen3"),
    (r"glm-?[45]", "glm45", "glm45"),
    (r"minimax-?m2", "minimax_m2", "minimax_m2"),
    (r"minimax-?m3", "minimax_m3", "minimax_m3"),
    (r"nemotron-nano.*v2", "nemotron_deci", "basic"),
    (r"nemotron.*(nano|3)", "qwen3_coder", "nemotron_nano"),
    (r"nemotron", "nemotron_deci", "basic"),
    (r"llama-?4", "pythonic", None),
    (r"functionary.*3\.1", "functionary", None),
    (r"functionary.*3\.2", "functionary_v3_2", None),
    (r"xlam", "xlam", "basic"),
    (r"llama-?3", "llama3_json", None),
    (r"magistral|mistral|devstral|ministral|codestral", "mistral", "mistral"),
    (r"functiongemma", "functiongemma", None),
    (r"gemma-?4", "gemma4", "gemma4"),
    (r"gemma-?3", "gemma3", None),
    (r"phi-?4-mini", "phi4_mini", None),
    (r"phi-?4", "phi4", "phi4"),
    (r"granite-20b-func", "granite_20b_fc", None),
    (r"granite-4", "hermes", None),
    (r"granite", "granite", "granite"),
    (r"step-?3\.5", "qwen3_coder", "step3"),
    (r"step-?3", "step3", "step3"),
    (r"jamba", "jamba", None),
    (r"olmo-?3", "olmo3", "basic"),
    (r"lfm2", "lfm2", None),
    (r"apertus", "apertus", "apertus"),
    (r"hunyuan-a13b", "hunyuan_a13b", "hunyuan_a13b"),
    (r"hy-?v?[34]\b", "hy_v3", "hy_v3"),
    (r"ernie-?4\.5.*think", "ernie45", "ernie45"),
    (r"internlm|intern-?s1", "internlm", "qwen3"),
    (r"longcat", "longcat", "longcat"),
    (r"gigachat-?3\.5", "gigachat3_5", "deepseek_r1"),
    (r"gigachat-?3", "gigachat3", None),
    (r"solar-open", "solar_open", "solar_open"),
    (r"minicpm-?5", "minicpm5", "qwen3"),
    (r"seed-?oss", "seed_oss", "seed_oss"),
    (r"mimo-?v2", "mimo", "qwen3"),
    (r"plamo-?3", "plamo3", "plamo3"),
    (r"inkling", "inkling", "inkling"),
    (r"muse", "muse", "muse"),
    (r"k2-?horizon", "k2_horizon", "k2_horizon"),
    (r"iquest-?q1", "iquest_q1", "kimi_k25"),
    (r"apriel", "jamba", "apriel"),
    (r"ling-?3|laguna", "glm45", "glm45"),
]

# Architectures in `config.json` that have one grammar, whatever the template says.
ARCHITECTURES: dict[str, tuple[str | None, str | None]] = {
    "ApertusForCausalLM": ("apertus", "apertus"),
    "BailingMoeV3ForCausalLM": ("glm45", "glm45"),
    "BailingMoeV3VLForConditionalGeneration": ("glm45", "glm45"),
    "BeamForCausalLM": ("beam", "beam"),
    "Cohere2ForCausalLM": ("cohere_command", "cohere_command"),
    "Cohere2MoeForCausalLM": ("cohere_command", "cohere_command"),
    "Cohere2VisionForConditionalGeneration": ("cohere_command", "cohere_command"),
    "DeepseekV32ForCausalLM": ("deepseek_v3_2", "qwen3"),
    "DeepseekV41ForCausalLM": ("deepseek_v4_1", "qwen3"),
    "DeepseekV4ForCausalLM": ("deepseek_v3_2", "qwen3"),
    "DeepseekV4ForConditionalGeneration": ("deepseek_v3_2", "qwen3"),
    "Dots3NoteForCausalLM": ("dots", "qwen3"),
    "Gemma4ForCausalLM": ("gemma4", "gemma4"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4"),
    "Glm4MoeForCausalLM": ("glm45", "glm45"),
    "Glm4MoeLiteForCausalLM": ("glm45", "glm45"),
    "GlmMoeDsaForCausalLM": ("glm45", "glm45"),
    "GptOssForCausalLM": ("harmony", "harmony"),
    "HYV3ForCausalLM": ("hy_v3", "hy_v3"),
    "HYV4ForCausalLM": ("hy_v3", "hy_v3"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_a13b", "hunyuan_a13b"),
    "IQuestQ1ForCausalLM": ("iquest_q1", "kimi_k25"),
    "InklingForCausalLM": ("inkling", "inkling"),
    "InklingForConditionalGeneration": ("inkling", "inkling"),
    "InternLM2ForCausalLM": ("internlm", None),
    "InternS1ForConditionalGeneration": ("internlm", "qwen3"),
    "InternS1ProForConditionalGeneration": ("internlm", "qwen3"),
    "JambaForCausalLM": ("jamba", "basic"),
    "K2HorizonForCausalLM": ("k2_horizon", "k2_horizon"),
    "KimiK25ForConditionalGeneration": ("kimi_k2", "kimi_k25"),
    "KimiK3ForConditionalGeneration": ("kimi_k3", "kimi_k3"),
    "LagunaForCausalLM": ("glm45", "glm45"),
    "Lfm2ForCausalLM": ("lfm2", "basic"),
    "Lfm2MoeForCausalLM": ("lfm2", "basic"),
    "Llama4ForConditionalGeneration": ("pythonic", None),
    "LongcatFlashForCausalLM": ("longcat", "longcat"),
    "LongcatFlashNgramForCausalLM": ("longcat", "longcat"),
    "MiMoV2FlashForCausalLM": ("mimo", "qwen3"),
    "MiMoV2ForCausalLM": ("mimo", "qwen3"),
    "MiMoV2OmniForCausalLM": ("mimo", "qwen3"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "minimax_m2"),
    "MiniMaxM3SparseForCausalLM": ("minimax_m3", "minimax_m3"),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3", "minimax_m3"),
    "MuseGlimmerForCausalLM": ("muse", "muse"),
    "MuseGlimmerForConditionalGeneration": ("muse", "muse"),
    "MuseSparkForConditionalGeneration": ("muse", "muse"),
    "NanbeigeForCausalLM": ("qwen3_coder", "qwen3"),
    "Olmo3ForCausalLM": ("olmo3", "basic"),
    "Plamo3ForCausalLM": ("plamo3", "plamo3"),
    "Qwen3NextForCausalLM": ("hermes", "qwen3"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_coder", "qwen3"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_coder", "qwen3"),
    "SeedOssForCausalLM": ("seed_oss", "seed_oss"),
    "SolarOpenForCausalLM": ("solar_open", "solar_open"),
    "Step3VLForConditionalGeneration": ("step3", "step3"),
    "Step3p5ForCausalLM": ("qwen3_coder", "step3"),
    "Step5ForCausalLM": ("qwen3_coder", "step3"),
    "Step5ForConditionalGeneration": ("qwen3_coder", "step3"),
}


def by_template(source: str) -> tuple[str | None, str | None] | None:
    """Names of the (tool-call, reasoning) parsers of a chat template; None if it is unknown."""
    for signs, tool, reasoning in TEMPLATE_SIGNS:
        if all(sign in source for sign in signs):
            return tool, reasoning if _thinks(source, reasoning) else None
    return None


def by_architecture(names: Iterable[str]) -> tuple[str | None, str | None] | None:
    """Names of the (tool-call, reasoning) parsers of a model's architectures; None if unknown."""
    return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)


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
