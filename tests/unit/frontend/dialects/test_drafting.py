"""Drafts of parsers read what templates write that no known parser reads, and models' outputs."""

import json
from pathlib import Path

import msgspec
import pytest
from support.real_templates import real_templates
from unit.frontend.dialects.recorded import CONFIG, from_source

from kvmesh.cli.main import run
from kvmesh.demo import model_dir
from kvmesh.frontend.dialects import ChatTemplate, DialectError, choose_grammar
from kvmesh.frontend.dialects.drafting import draft
from kvmesh.frontend.dialects.families import REASONING_PARSERS, TOOL_PARSERS
from kvmesh.frontend.dialects.grammar import OwnGrammar
from kvmesh.frontend.dialects.own_grammar import FILE, fault_of, own_grammar
from kvmesh.frontend.dialects.preview import merge_deltas

_HEAD = """{%- for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>"""
_THOUGHT = (
    "{% if message.reasoning_content %}<ponder>{{ message.reasoning_content }}</ponder>{% endif %}"
)
_TAIL = """{{ message.content or '' -}}
{% for call in message.tool_calls or [] %}CALL{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
_FUNCTION = "call.function"
CALLS = {
    "a name, then JSON": "<act>{{ F.name }} = {{ F.arguments | tojson }}</act>",
    "a section around all calls": "{% if loop.first %}<acts>{% endif %}"
    "<act>{{ F.name }}<with>{{ F.arguments | tojson }}</act>{% if loop.last %}</acts>{% endif %}",
    "an object": '<act>{"fn": {{ F.name | tojson }}, "in": {{ F.arguments | tojson }}}</act>',
    "a name as a key": "<act>{ {{- F.name | tojson }}: {{ F.arguments | tojson -}} }</act>",
    "tags": "<act is={{ F.name }}>{% for key, value in F.arguments.items() %}"
    "<arg is={{ key }}>{{ value }}</arg>{% endfor %}</act>",
    "tags on lines of their own": "<act>{{ F.name }}\n{% for key, value in F.arguments.items() %}"
    "<k>{{ key }}</k>\n<v>{{ value }}</v>\n{% endfor %}</act>",
    "ids": "<act>{{ F.name }}<id>{{ call.id }}<in>{{ F.arguments | tojson }}</act>",
}


def made(call: str, thought: str = _THOUGHT) -> ChatTemplate:
    return from_source(
        _HEAD + thought + _TAIL.replace("CALL", call.replace("F.", "call.function."))
    )


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("thought", ["", _THOUGHT], ids=["", "thinking"])
def test_a_draft_reads_all_that_the_template_writes(form: str, thought: str) -> None:
    found = draft(made(CALLS[form], thought))
    assert found is not None
    assert (found.read, found.thinking) == (found.written, True)
    assert not fault_of(found.own)


def test_most_real_templates_could_be_drafted() -> None:
    try:
        sources = real_templates()
    except OSError as error:
        pytest.skip(f"no package index: {error}")
    whole = total = 0
    for source in sources.values():
        template = ChatTemplate({"chat_template.jinja": source, "tokenizer_config.json": CONFIG})
        if template.written_calls:
            total += 1
            found = draft(template)
            whole += found is not None and found.read == found.written and found.thinking
    assert whole >= 0.8 * total > 50


def test_grammars_survive_a_file_and_the_families_are_within_its_limits() -> None:
    for calls in TOOL_PARSERS.values():
        own = OwnGrammar(calls)
        assert msgspec.json.decode(msgspec.json.encode(own), type=OwnGrammar) == own
    faulty = [name for name, calls in TOOL_PARSERS.items() if fault_of(OwnGrammar(calls))]
    assert faulty == ["kimi_k2"]  # a pattern tells its names
    assert not any(fault_of(OwnGrammar(None, each)) for each in REASONING_PARSERS.values())


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"tool_calls": {"forms": [{"type": "NameKeys"}]}}, "where a call begins"),
        ({"tool_calls": {"forms": [], "begin": ["<a>"]}}, "forms of calls"),
        ({"tool_calls": {"forms": [{"type": "NameKeys"}] * 9, "begin": ["<a>"]}}, "forms of calls"),
        ({"tool_calls": {"forms": [{"type": "NameKeys"}], "begin": [""]}}, "empty"),
        ({"tool_calls": {"forms": [{"type": "NameKeys"}], "begin": ["x" * 999]}}, "characters"),
        (
            {"tool_calls": {"forms": [{"type": "NamedJson", "open": ["<"], "name": "(a+)+"}]}},
            "pattern",
        ),
        ({"reasoning": {"begin": ["<t>"], "end": []}}, "marks of its end"),
        ({"reasoning": {"begin": ["<t>"], "end": [""]}}, "marks of its end"),
        ({"tool_calls": {"forms": [{"type": "Unknown"}]}}, "Unknown"),
        ({"tool_calls": 3}, "object"),
    ],
)
def test_a_folders_grammar_is_bounded(own: object, said: str) -> None:
    with pytest.raises(DialectError, match=said):
        own_grammar({FILE: json.dumps({"own_parser": own}).encode()})


def test_the_command_drafts_proves_and_writes_what_a_frontend_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_dir().iterdir():
        if "template" not in file.name and file.is_file():
            folder.joinpath(file.name).write_bytes(file.read_bytes())
    source = (
        _HEAD
        + _THOUGHT
        + _TAIL.replace("CALL", CALLS["a section around all calls"].replace("F.", "call.function."))
    )
    folder.joinpath("chat_template.jinja").write_text(source)
    folder.joinpath(FILE).write_text('{"note": 1}')
    raw = '<ponder>hm</ponder>Look.<acts><act>ls<with>{}</act><act>cat<with>{"p": 1}</act></acts>'
    output = tmp_path / "raw.txt"
    output.write_text(raw)
    assert run(["model", "parser", "new", str(folder), str(output)]) == 0
    said = capsys.readouterr().out
    assert "the template: read, 4 of 4" in said
    assert f"{output}: read, 2 calls, alike in 20 of 20" in said
    hints = json.loads(folder.joinpath(FILE).read_text())
    assert (hints["note"], hints["tool_parser"], hints["reasoning_parser"]) == (1, "own", "own")
    files = {FILE: folder.joinpath(FILE).read_bytes()}
    grammar = choose_grammar("m", tool_parser="own", reasoning_parser="own", own=own_grammar(files))
    parser = grammar.parser([])
    events = [event for character in raw for event in parser.feed(character)]
    assert merge_deltas([*events, *parser.finish()]) == [
        ("thinking", "", "hm"),
        ("text", "", "Look."),
        ("call", "ls", "{}"),
        ("call", "cat", '{"p": 1}'),
    ]
    assert all(grammar.uses(mark) for mark in ("<acts>", "<ponder>"))
    assert run(["model", "parser", "try", str(folder), str(output)]) == 0
    assert "[call cat]" in capsys.readouterr().out


def test_a_model_whose_parser_is_known_needs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "parser", "new", str(model_dir()), "--dry-run"]) == 0
    assert "no other is needed" in capsys.readouterr().out


def test_a_template_without_calls_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model_dir().iterdir():
        if "template" not in file.name and file.is_file():
            tmp_path.joinpath(file.name).write_bytes(file.read_bytes())
    tmp_path.joinpath("chat_template.jinja").write_text("{{ messages[0].content }}")
    assert run(["model", "parser", "new", str(tmp_path)]) == 1
    assert "shows no tools, or no calls" in capsys.readouterr().err
