"""Arguments of calls, kept between prompts."""

import json

import pytest

from kvmesh.frontend.conversation import ToolCall
from kvmesh.frontend.dialects.templates import call_arguments
from kvmesh.frontend.dialects.templates.call_arguments import CallArguments
from kvmesh.frontend.dialects.templates.prompt_json import RepeatedEntry, dumps
from kvmesh.frontend.dialects.tools import arguments


def call(written: str, *, custom: bool = False) -> ToolCall:
    return ToolCall("call_1", "read", written, custom=custom)


@pytest.mark.parametrize(
    "written", ['{"path": "a.py", "lines": [1, 2]}', "{", "", "7", '{"é": 1.0}']
)
def test_kept_arguments_are_those_of_the_call(written: str) -> None:
    kept = CallArguments()
    for _ in range(2):
        shown = kept.of("", call(written))
        assert shown == arguments(call(written))
        assert isinstance(shown, RepeatedEntry)
        assert shown.dumps() == dumps(arguments(call(written)))
    assert kept.of("", call(written)) is shown
    assert kept.of("other tenant", call(written)) is not shown


def test_free_text_of_a_custom_tool_is_not_read() -> None:
    kept = CallArguments()
    assert kept.of("", call('{"a": 1}', custom=True)) == {"input": '{"a": 1}'}
    assert kept.of("", call('{"a": 1}')) == {"a": 1}


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_arguments, "MEMO_BYTES", 10_000)
    kept, written = CallArguments(), [json.dumps({"a": index}) for index in range(20)]
    first = kept.of("", call(written[0]))
    for text in written[1:]:
        kept.of("", call(text))
    assert kept.of("", call(written[0])) is not first
    large = json.dumps({"a": "x" * 10_000})
    assert kept.of("", call(large)) is not kept.of("", call(large))
