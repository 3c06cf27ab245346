"""A model's parsers read what its template writes; others replace those that do not."""

import pytest
from unit.frontend.dialects.recorded import TEMPLATES, from_source, template

from kvmesh.frontend.dialects import ChatTemplate, OutputGrammar, choose_grammar
from kvmesh.frontend.dialects.read_back import calls_read, reads_back, reads_thinking

_HEAD = """{%- for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>"""
_TAIL = """{{ message.content or '' -}}
{% for call in message.tool_calls or [] %}CALL{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>OPENING{% endif %}"""
_THOUGHT = (
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
)
_JSON = (
    '{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}'
)
_TAGS = (
    "<function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function>"
)


def made(call: str, thought: str = "", opening: str = "") -> ChatTemplate:
    tail = _TAIL.replace("CALL", call).replace("OPENING", opening)
    return from_source(_HEAD + thought + tail)


NAMES = {path.stem for path in TEMPLATES.iterdir()} - {"within_turn"}  # whose form is no family's


@pytest.mark.parametrize("name", ["demo", *sorted(NAMES)])
def test_the_parsers_of_a_template_read_what_it_writes(name: str) -> None:
    found = template(name)
    grammar = choose_grammar("", found)
    read = calls_read(found, grammar, OutputGrammar(grammar.tool_parser))
    assert read == len(found.written_calls)
    assert reads_thinking(found, grammar)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (f"<tool_call>{_JSON}</tool_call>", "hermes"),
        # a template that mentions the marker of another family
        (f"{{# <|tool_calls_section_begin|> #}}<tool_call>{_JSON}</tool_call>", "hermes"),
        (f"<seed:tool_call>{_TAGS}</seed:tool_call>", "seed_oss"),
        (f"<tool_call>{_TAGS}</tool_call>", "qwen3_coder"),
        # no marker at all
        (_JSON, "llama3_json"),
    ],
)
def test_the_parser_that_reads_a_template_is_chosen(call: str, name: str) -> None:
    found = made(call)
    grammar = choose_grammar("a-name", found)
    assert grammar.tool_parser == name
    assert reads_back(found, grammar)
    others = {"hermes", "qwen3_coder", "deepseek_v3"} - {name}
    assert not any(reads_back(found, OutputGrammar(other)) for other in others)


def test_markup_beside_a_call_is_not_read() -> None:
    found = made(f"<seed:tool_call>{_TAGS}</seed:tool_call>")
    assert not reads_back(found, OutputGrammar("qwen3_coder"))


def test_thinking_is_read_back() -> None:
    found = made(f"<tool_call>{_JSON}</tool_call>", _THOUGHT)
    assert not reads_back(found, OutputGrammar("hermes"))
    assert reads_back(found, OutputGrammar("hermes", "qwen3"))
    seed = _THOUGHT.replace("think>", "seed:think>")
    assert choose_grammar("", made(f"<tool_call>{_JSON}</tool_call>", seed)) == OutputGrammar(
        "hermes", "seed_oss"
    )
    opened = made(f"<tool_call>{_JSON}</tool_call>", _THOUGHT, "<think>\n")
    assert reads_back(opened, OutputGrammar("hermes", "qwen3"))


def test_what_no_parser_reads_leaves_the_detected_one() -> None:
    unnamed = _JSON.replace('"name"', '"callee"')
    found = made(f"<tool_call>{unnamed}</tool_call>")
    assert choose_grammar("", found).tool_parser == "hermes"
    assert not reads_back(found, choose_grammar("", found))


def test_the_parser_that_reads_most_is_chosen() -> None:
    """The template's own arguments are no Python."""
    pairs = (
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }},{% endfor %}"
    )
    found = made("[{{ call.function.name }}(" + pairs + ")]")
    assert choose_grammar("", found).tool_parser == "pythonic"


def test_configured_parsers_are_not_replaced() -> None:
    found = made(f"<tool_call>{_JSON}</tool_call>")
    assert choose_grammar("", found, tool_parser="mistral").tool_parser == "mistral"
    assert choose_grammar("", found, tool_parser="none").tool_parser is None


def test_a_template_without_calls_has_none_to_read() -> None:
    assert reads_back(from_source("{{ messages[0].content }}"), OutputGrammar())
