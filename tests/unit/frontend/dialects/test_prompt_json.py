"""JSON in prompts: long values are serialized in steps, byte for byte like `json.dumps`."""

import json
from types import SimpleNamespace

import pytest

from kvmesh.frontend.dialects.templates import prompt_json
from kvmesh.frontend.dialects.templates.prompt_json import MAX_VALUES_AT_ONCE, dumps


def test_long_json_is_serialized_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"é": [[n, {"a": None}] for n in range(MAX_VALUES_AT_ONCE)], "b": 'x"'}
    wanted = json.dumps(value, ensure_ascii=False)

    def never(*_: object, **__: object) -> str:
        raise AssertionError("in one call")

    # there only: other code of this process may serialize something meanwhile
    module = SimpleNamespace(dumps=never, JSONEncoder=json.JSONEncoder)
    monkeypatch.setattr(prompt_json, "json", module)
    assert dumps(value) == wanted
    assert dumps(value, separators=(",", ":")) == wanted.replace(", ", ",").replace(": ", ":")
    with pytest.raises(AssertionError):
        dumps([1])
