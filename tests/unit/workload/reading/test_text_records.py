"""The prompts of recorded requests, and the times of conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.workload.formats.registry import load

SAID = [{"role": "user", "content": "hi " * 20}, {"role": "assistant", "content": "yo " * 20}]
LONG = "x" * 400  # 100 tokens
ASKED = {"role": "user", "content": "q"}
ANTHROPIC = [{"type": "text", "text": LONG}]
BODIES: dict[str, dict[str, Any]] = {
    "a system text": {"system": LONG, "messages": [ASKED]},
    "parts of a system text": {"system": ANTHROPIC, "messages": [ASKED]},
    "instructions": {"instructions": LONG, "input": "q"},
    "instructions before items": {"instructions": LONG, "input": [ASKED]},
    "tools as text": {"tools": LONG, "messages": [ASKED]},
    "a call": {"input": [ASKED, {"type": "function_call", "name": "f", "arguments": LONG}]},
    "an old call": {
        "messages": [ASKED, {"role": "assistant", "function_call": {"name": LONG}}, ASKED]
    },
    "an output": {"input": [ASKED, {"type": "function_call_output", "output": LONG}]},
    "reasoning": {
        "input": [ASKED, {"type": "reasoning", "summary": [{"type": "summary_text", "text": LONG}]}]
    },
    "thinking": {"messages": [ASKED, {"role": "assistant", "reasoning_content": LONG}, ASKED]},
    "a tool's parts": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": ANTHROPIC}]}]
    },
    "token ids": {"prompt": [*range(100)]},
}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("name", BODIES)
def test_all_texts_of_a_request_are_its_prompt(name: str, limit: str, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"body": {**BODIES[name], limit: 7}}) + "\n")
    (round_,) = load(str(file))[0].rounds
    assert 100 <= round_.input_tokens < 115
    assert round_.output_tokens == 7


def test_conversations_start_at_their_times(tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    times = ("2023-04-09T00:02:53+00:00", "2023-04-09 00:03:53")
    file.write_text(
        "".join(json.dumps({"timestamp": time, "conversation": SAID * 2}) + "\n" for time in times)
    )
    workload, repairs = load(str(file))
    assert [(round_.at_s, round_.after) for round_ in workload.rounds] == [
        (0.0, ()),
        (0.0, (0,)),
        (60.0, ()),
        (0.0, (2,)),
    ]
    assert repairs.notes == [
        "lengths are estimates: a token is 4 bytes of text, and a template adds none"
    ]


def test_a_cell_may_be_a_long_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.csv"
    file.write_text(f'prompt,output_tokens_count\n"{"x" * 400_000}",5\n')
    assert [round_.input_tokens for round_ in load(str(file))[0].rounds] == [100_000]


def test_a_system_text_beside_a_conversation_is_in_every_prompt(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.jsonl"
    file.write_text(json.dumps({"system": LONG, "conversations": SAID * 2}) + "\n")
    first, second = load(str(file))[0].rounds
    assert first.input_tokens > 100
    assert second.input_tokens > 100 + 2 * 15
