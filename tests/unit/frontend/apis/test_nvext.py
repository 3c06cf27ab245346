"""The nvext extension of request bodies."""

from typing import Any

from unit.frontend.apis.bodies import request

from kvmesh.frontend.apis.nvext import MAX_IGNORED


def test_nvext_shapes_the_request() -> None:
    made = request(
        nvext={
            "agent_hints": {"priority": -3, "strict_priority": 2, "latency_sensitivity": 0.5},
            "session_control": {"session_id": "s", "action": "close"},
            "token_data": [1, 2, 3],
            "greed_sampling": True,
            "routing_constraints": {"labels": {"zone": "a"}},
            "extra_fields": ["timing"],
        }
    )
    assert (made.hints.priority, made.hints.strict_priority) == (-3, 2)
    assert (made.hints.session, made.hints.session_final) == ("s", True)
    assert made.prompts == [[1, 2, 3]]
    assert made.sampling.temperature == 0
    assert made.placement.labels == {"zone": "a"}
    assert made.extra_fields == {"timing"}


def test_fields_without_effect_are_listed_on_request() -> None:
    nvext = {"extra_fields": ["ignored"], "annotations": ["x"], "novel": 1}
    made = request(nvext=nvext, verbosity="low", temperature=0.5)
    assert made.ignored == ["verbosity", "nvext.annotations", "nvext.novel"]


def test_the_list_of_fields_without_effect_is_bounded() -> None:
    fields: dict[str, Any] = {f"f{n}": n for n in range(5000)}
    made = request(nvext={"extra_fields": ["ignored"]}, **fields)
    assert len(made.ignored) == len(set(made.ignored)) == MAX_IGNORED
