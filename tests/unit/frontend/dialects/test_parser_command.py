"""`kvmesh model parser` as a user runs it."""

import json
from pathlib import Path

import pytest

from kvmesh.cli.main import run

RAW = "Hm.\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"


def test_try_shows_how_a_file_parses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "raw.txt"
    file.write_text(RAW)
    assert run(["model", "parser", "try", "qwen3_coder", str(file)]) == 0
    assert capsys.readouterr().out == '[text]\nHm.\n\n[call f]\n{\n  "n": 3\n}\n'
    tools = tmp_path / "tools.json"
    parameters = {"type": "object", "properties": {"n": {"type": "string"}}}
    function = {"name": "f", "parameters": parameters}
    tools.write_text(json.dumps([{"type": "function", "function": function}]))
    assert run(["model", "parser", "try", "qwen3_coder", str(file), "--tools", str(tools)]) == 0
    assert '"n": "3"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("nothing", b"x", "unknown output parser 'nothing'; known: "), ("hermes", b"\xff", "utf-8")],
)
def test_errors_name_their_cause(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "raw.txt"
    file.write_bytes(content)
    assert run(["model", "parser", "try", name, str(file)]) == 1
    assert said in capsys.readouterr().err


def test_list_prints_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "parser", "list"]) == 0
    assert "qwen3_coder" in capsys.readouterr().out


def test_a_worker_with_an_unknown_parser_does_not_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags in (["worker", "--tool-parser", "x"], ["up", "--worker-reasoning-parser", "x"]):
        with pytest.raises(SystemExit) as ending:
            run(flags)
        assert ending.value.code == 2
        assert "parser 'x'; known: " in capsys.readouterr().err
