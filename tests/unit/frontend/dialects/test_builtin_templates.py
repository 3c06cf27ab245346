"""Models that are published with an encoder instead of a chat template get the same prompts.

`make parsers` compares them with the encoders themselves.
"""

import json
from typing import Any

import pytest
from unit.frontend.dialects.recorded import (
    TODAY,
    assistant,
    call,
    request,
    result,
    system,
    tool,
    user,
)

from kvmesh.bus.messages import ModelCard
from kvmesh.demo import model_dir
from kvmesh.frontend.conversation import GenerateRequest, Thinking
from kvmesh.frontend.dialects import ChatTemplate, TemplateError
from kvmesh.frontend.dialects.templates.model_files import vocabulary
from kvmesh.frontend.models import Dialect

ARCHITECTURES = {
    "v3.2": {"architectures": ["DeepseekV32ForCausalLM"]},
    "v4": {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
    "v4.1": {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v41"},
    "k3": {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"},
}
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
DSML_CALL = (
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="s" string="true">a"b</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1, "é"]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


def template(name: str) -> ChatTemplate:
    return ChatTemplate({"config.json": json.dumps(ARCHITECTURES[name]).encode()})


def rendered(name: str, asked: GenerateRequest) -> str:
    return template(name).render(asked, TODAY)


def loop(**fields: Any) -> GenerateRequest:
    """A conversation within a tool loop."""
    return request(
        system("Rules"),
        user("Go"),
        assistant(Thinking("Hm"), call("f", "1", s='a"b', n=[1, "é"])),
        result("R1", "1"),
        tools=[tool("f")],
        **fields,
    )


def test_v3_2_writes_calls_and_results_in_its_own_markup() -> None:
    text = rendered("v3.2", loop(thinking=True))
    assert text.startswith(f"{BOS}Rules\n\n## Tools\nYou have access to a set of tools you can use")
    assert '<functions>\n{"name": "f", "description": "Does f.", "parameters": ' in text
    assert text.endswith(
        f"</functions>\n{USER}Go{ASSISTANT}<think>Hm</think>\n\n<｜DSML｜function_calls>\n"
        f"{DSML_CALL}"
        f"</｜DSML｜function_calls>{EOS}\n\n<function_results>\n<result>R1</result>\n"
        "</function_results>\n\n<think>"
    )


def test_v4_writes_results_in_the_users_turn() -> None:
    text = rendered("v4", loop(template_args={"reasoning_effort": "low"}))
    assert text.startswith(f"{BOS}Rules\n\n## Tools\n\nYou have access to a set of tools to help")
    assert text.endswith(
        f"\n{USER}Go{ASSISTANT}<think>Hm</think>\n\n<｜DSML｜tool_calls>\n"
        f"{DSML_CALL}"
        f"</｜DSML｜tool_calls>{EOS}{USER}<tool_result>R1</tool_result>{ASSISTANT}<think>"
    )


def test_v4_1_has_a_budget_and_a_system_token() -> None:
    text = rendered("v4.1", loop())
    effort = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough"
    assert text.startswith(f"{BOS}<｜System｜>{effort} the reasoning)\n\nRules\n\n## Tools")
    assert '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="s"' in text
    late = request(user("a"), assistant("b"), system("Late"), user("c"), thinking=False)
    assert rendered("v4.1", late) == (
        f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}<｜System｜>Late{USER}c{ASSISTANT}</think>"
    )


def test_k3_declares_tools_in_order_of_their_keys() -> None:
    text = rendered("k3", loop())
    head = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    declared = '[{"function":{"description":"Does f.","name":"f","parameters":'
    assert text.startswith(
        f'<|open|>message role="system" type="tool-declare"<|sep|>{head}{declared}'
    )
    assert "Now the system is invoked with `thinking_effort=max`." in text
    assert text.endswith(
        '<|open|>message role="user"<|sep|>Go<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Hm<|close|>think<|sep|>'
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>a"b<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="array"<|sep|>[1, "é"]<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="f" index="1"<|sep|>R1<|close|>message<|sep|>'
        '<|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


@pytest.mark.parametrize(
    ("name", "thinks"),
    [("v3.2", "<think>"), ("v4", "<think>"), ("v4.1", "<think>"), ("k3", "<|open|>think<|sep|>")],
)
def test_the_switch_of_thinking_opens_or_closes_it(name: str, thinks: str) -> None:
    on, off = (rendered(name, request(user("x"), thinking=value)) for value in (True, False))
    assert on.endswith(thinks)
    assert not off.endswith(thinks)


@pytest.mark.parametrize("name", ["v4.1", "k3"])
def test_an_unknown_effort_is_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="_effort is low"):
        rendered(name, request(user("x"), template_args={"reasoning_effort": "huge"}))


def test_a_template_in_the_folder_comes_first() -> None:
    files = {
        "config.json": json.dumps(ARCHITECTURES["v4"]).encode(),
        "chat_template.jinja": b"{{ messages[0].content }}",
    }
    assert ChatTemplate(files).render(request(user("x")), TODAY) == "x"


def test_other_folders_without_a_template_have_none() -> None:
    files = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(files).render(request(user("x")), TODAY)


@pytest.mark.parametrize("served", ["some-alias", "qwen3-coder"])
def test_the_folder_chooses_the_parsers_whatever_the_served_name(served: str) -> None:
    files = {f.name: f.read_bytes() for f in model_dir().iterdir()}
    del files["tokenizer_config.json"]  # and with it the template
    files["config.json"] = b'{"architectures": ["MiniMaxM2ForCausalLM"]}'
    card = ModelCard(name=served, context=1 << 17, block_size=16, files="f")
    grammar = Dialect(card, files).grammar
    assert (grammar.tool_parser, grammar.reasoning_parser) == ("minimax_m2", "minimax_m2")


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 9}, 9),
        ({"text_config": {"vocab_size": 9}}, 9),
        ({"vocab_size": 7, "text_config": {"vocab_size": 9}}, 9),
        ({"vocab_size": None, "text_config": "x"}, 0),
    ],
)
def test_the_vocabulary_has_the_unused_ids_of_the_configuration(
    config: dict[str, Any], size: int
) -> None:
    assert vocabulary({"config.json": json.dumps(config).encode()}) == size
    assert vocabulary({}) == 0
