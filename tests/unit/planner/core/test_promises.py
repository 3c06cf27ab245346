"""Promises of the settings, and the requests that each covers."""

import pytest

from kvmesh.planner.core.promises import Promise, covers, parse_promises, promises_of
from kvmesh.planner.errors import PlannerConfigError


@pytest.mark.parametrize(
    ("text", "promise"),
    [
        ("p95=2s", Promise("ttft", 0.95, 2.0)),
        ("p99.9=500ms", Promise("ttft", 0.999, 0.5)),
        ("batch:p90=1m", Promise("ttft", 0.9, 60.0, "", "batch")),
        ("org/model/p50=1.5s", Promise("ttft", 0.5, 1.5, "org/model")),
        ("org/model/batch:p50=1s", Promise("ttft", 0.5, 1.0, "org/model", "batch")),
    ],
)
def test_a_promise_is_read(text: str, promise: Promise) -> None:
    (found,) = parse_promises("ttft", [text])
    assert found.quantile == pytest.approx(promise.quantile)
    assert (found.seconds, found.model, found.request_class) == (
        promise.seconds,
        promise.model,
        promise.request_class,
    )


@pytest.mark.parametrize(
    "text",
    ["", "p95", "95=2s", "p95=2", "p95=2h", "p0=2s", "p100=2s", "p101=2s", "p95=0s", "p95=-1s",
     "p95=nans", "p95=" + "9" * 400 + "s", "p٩٥=2s", ":p95=2s", "p99.99999999999999999999=1s",
     "a b=2s", "p95=2s "],
)  # fmt: skip
def test_a_mistake_is_named(text: str) -> None:
    with pytest.raises(PlannerConfigError) as caught:
        parse_promises("itl", [text])
    assert "itl" in str(caught.value)
    assert text in str(caught.value)


def test_contradictions_are_errors() -> None:
    for texts in (["p95=2s", "p95=3s"], ["p95=2s", "p99=1s"], ["p99=1s", "p50=2s"]):
        with pytest.raises(PlannerConfigError):
            parse_promises("ttft", texts)
    assert len(parse_promises("ttft", ["p50=1s", "p99=1s", "batch:p50=9s", "m/p50=5s"])) == 4


def test_a_models_own_promises_replace_those_of_all_models_by_metric() -> None:
    everyone = [Promise("ttft", 0.9, 1.0), Promise("itl", 0.9, 0.1)]
    own = Promise("ttft", 0.9, 5.0, "m")
    assert promises_of([*everyone, own], "m") == [own, everyone[1]]
    assert promises_of([*everyone, own], "other") == everyone
    assert promises_of([*everyone, own], "") == everyone


def test_a_class_without_an_own_promise_falls_under_those_without_a_class() -> None:
    general, batch = Promise("ttft", 0.9, 1.0), Promise("ttft", 0.9, 60.0, "", "batch")
    tokens = Promise("itl", 0.9, 0.1)
    promises = [general, batch, tokens]
    classes = ["", "batch", "chat"]
    assert [c for c in classes if covers(general, promises)(c)] == ["", "chat"]
    assert [c for c in classes if covers(batch, promises)(c)] == ["batch"]
    assert [c for c in classes if covers(tokens, promises)(c)] == classes
