"""Prompts of real templates: those that Transformers writes, but for adaptations that keep text.

`make parsers` compares all templates.
"""

import pytest
from support.real_templates import real_templates
from support.template_matrix import differences

# One of each family whose templates lose a part of an answer, and others with forms of their own.
CHOSEN = [
    "llama-cpp-python/Apertus-8B-Instruct",
    "llama-cpp-python/Kimi-K2-Instruct",
    "llama-cpp-python/Kimi-K3",
    "llama-cpp-python/Qwen3-Coder",
    "llama-cpp-python/deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "llama-cpp-python/deepseek-ai-DeepSeek-V3.1",
    "llama-cpp-python/deepseek-ai-DeepSeek-V4",
    "llama-cpp-python/google-gemma-2-2b-it",
    "llama-cpp-python/meta-llama-Llama-3.1-8B-Instruct",
    "llama-cpp-python/mistralai-Ministral-3-14B-Reasoning-2512",
    "llama-cpp-python/mistralai-Mistral-Nemo-Instruct-2407",
    "llama-cpp-python/openai-gpt-oss-120b",
    "llama-cpp-python/unsloth-mistral-Devstral-Small-2507",
    "trl/cohere2",
    "trl/gemma3",
    "trl/glm4moe",
    "trl/idefics3",
    "trl/qwen3",
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    try:
        real_templates()
    except OSError:  # no package index
        metafunc.parametrize("name", [])
    else:
        metafunc.parametrize("name", CHOSEN)


def test_nothing_but_thinking_is_lost_and_every_difference_is_explained(name: str) -> None:
    assert differences(real_templates()[name].decode()) == {}
