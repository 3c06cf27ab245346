"""Bounds of sampling fields."""

from typing import Any

import pytest
from unit.frontend.apis.bodies import request as chat

from kvmesh.frontend.errors import InvalidRequest


def test_stop_strings_are_bounded_together() -> None:
    assert chat(stop=["a" * 64] * 64).sampling.stop
    with pytest.raises(InvalidRequest) as error:
        chat(stop=["a" * 65] * 64)
    assert error.value.param == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(token): 1.0 for token in range(1025)}},
        {"stop_token_ids": list(range(1025))},
    ],
)
def test_lists_of_tokens_are_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(**fields)
    assert error.value.param in fields
