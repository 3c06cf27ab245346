"""The demo model folder: reproducible, a faithful tokenizer, a template stable over turns."""

import json
from typing import Any

import pytest
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvmesh.demo import NAME, model_dir
from kvmesh.demo.corpus import inflected, words
from kvmesh.demo.train import SPECIAL, files, train

Messages = list[dict[str, Any]]

CONVERSATION: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
    {
        "role": "assistant",
        "content": "On it.",
        "reasoning_content": "I need a tool.",
        "tool_calls": [
            {"type": "function", "function": {"name": "ls", "arguments": {"path": "src"}}},
            {"type": "function", "function": {"name": "ls", "arguments": '{"path": "libs"}'}},
        ],
    },
    {"role": "tool", "content": "a.py"},
    {"role": "tool", "content": "b.py <tag>"},
    {"role": "assistant", "content": "Two files."},
    {"role": "user", "content": "Thanks."},
]
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    config = json.loads((model_dir() / "tokenizer_config.json").read_text())
    return environment.from_string(config["chat_template"])


def _raise(message: str) -> None:
    raise ValueError(message)


def test_training_again_gives_the_shipped_files() -> None:
    for name, text in files(train()).items():
        assert (model_dir() / name).read_text() == text, name


def test_folder_name_is_the_model_name() -> None:
    assert model_dir().name == NAME


@pytest.mark.parametrize(
    "text",
    ["plain words", "héllo 漢字 🙂", "\n\n\tdef f(x):\n        return x  \n", "", "\x00\x7f"],
)
def test_any_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_listed_word_is_one_token(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch([f" {word}" for word in words()])
    assert [e.tokens for e in encoded if len(e.ids) != 1] == []


def test_control_tokens_are_single_and_hidden_but_markup_is_shown(tokenizer: Tokenizer) -> None:
    assert [len(tokenizer.encode(text).ids) for text in SPECIAL] == [1] * len(SPECIAL)
    ids = tokenizer.encode("<think>\nso\n</think>done<|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\nso\n</think>done"


def test_generation_ends_at_the_end_of_a_turn(tokenizer: Tokenizer) -> None:
    generation = json.loads((model_dir() / "generation_config.json").read_text())
    assert tokenizer.token_to_id("<|im_end|>") in generation["eos_token_id"]


def test_vocabulary_and_context_are_stated(tokenizer: Tokenizer) -> None:
    config = json.loads((model_dir() / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["max_position_embeddings"] >= 131_072


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_each_turn_extends_the_prompt_before_it(
    template: Template, tools: Messages | None, thinking: bool | None
) -> None:
    extra = {} if thinking is None else {"enable_thinking": thinking}
    before = ""
    for end in range(1, len(CONVERSATION) + 1):
        prompt = template.render(messages=CONVERSATION[:end], tools=tools, **extra)
        assert prompt.startswith(before)
        before = prompt


def test_tool_calls_are_rendered_in_hermes_form(template: Template) -> None:
    prompt = template.render(messages=CONVERSATION, tools=TOOLS, add_generation_prompt=True)
    calls = prompt.split("<|im_end|>\n")[2].split("<tool_call>\n")[1:]
    parsed = [json.loads(call.split("\n</tool_call>")[0]) for call in calls]
    assert parsed == [
        {"name": "ls", "arguments": {"path": "src"}},
        {"name": "ls", "arguments": {"path": "libs"}},
    ]
    assert "<think>\nI need a tool.\n</think>\n\nOn it." in prompt
    assert "<tool_response>\nb.py <tag>\n</tool_response>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


def test_an_unknown_role_is_refused(template: Template) -> None:
    with pytest.raises(ValueError, match="unknown role: robot"):
        template.render(messages=[{"role": "robot", "content": "x"}])


@pytest.mark.parametrize(
    ("word", "suffix", "result"),
    [
        ("cache", "ing", "caching"),
        ("query", "s", "queries"),
        ("play", "ed", "played"),
        ("match", "s", "matches"),
        ("token", "s", "tokens"),
        ("safe", "ly", "safely"),
    ],
)
def test_inflection(word: str, suffix: str, result: str) -> None:
    assert inflected(word, suffix) == result
