"""The model of an alias that serves a session."""

from collections import Counter
from collections.abc import Callable

from kvmesh.bus.messages import AliasTarget, Hints, ModelAlias, Sampling
from kvmesh.frontend.aliases.choice import choose_target, main_target
from kvmesh.frontend.conversation import GenerateRequest, Message, Text
from kvmesh.frontend.preprocess.conversation_key import sticky_key

KEYS = [f"session {number}" for number in range(4000)]


def alias(**weights: float) -> ModelAlias:
    targets = [AliasTarget(model, weight) for model, weight in weights.items()]
    return ModelAlias(name="chat", targets=targets)


def always(_: str) -> bool:
    return True


def chosen(of: ModelAlias, serves: Callable[[str], bool] = always) -> dict[str, str]:
    return {key: choose_target(of, key, serves) for key in KEYS}


def test_sessions_are_spread_by_weight() -> None:
    counts = Counter(chosen(alias(a=95, b=5)).values())
    assert 120 < counts["b"] < 280  # 200 expected
    assert Counter(chosen(alias(a=1, b=0)).values()) == {"a": len(KEYS)}


def test_weight_that_moves_takes_only_its_sessions_along() -> None:
    before, after = chosen(alias(a=95, b=5)), chosen(alias(a=80, b=20))
    moved = {(before[key], after[key]) for key in KEYS if before[key] != after[key]}
    assert moved == {("a", "b")}


def test_models_without_workers_are_passed_over_unless_none_has_any() -> None:
    both = alias(a=50, b=50)
    assert set(chosen(both, lambda model: model == "b").values()) == {"b"}
    assert set(chosen(both, lambda _: False).values()) == {"a", "b"}
    assert main_target(alias(a=5, b=95), always) == "b"
    assert main_target(alias(a=5, b=95), lambda model: model == "a") == "a"


def request(text: str, session: str | None = None, tenant: str = "") -> GenerateRequest:
    return GenerateRequest(
        id=f"id-{text}",
        model="chat",
        sampling=Sampling(max_tokens=1),
        messages=[Message("user", [Text(text)])],
        hints=Hints(session=session),
        cache_salt=tenant,
    )


def test_a_session_keeps_its_model_and_so_does_a_conversation_without_one() -> None:
    assert sticky_key(request("one", "s")) == sticky_key(request("two", "s"))
    assert sticky_key(request("one", "s", "x")) != sticky_key(request("one", "s", "y"))
    assert sticky_key(request("one")) == sticky_key(request("one"))
    assert sticky_key(request("one")) != sticky_key(request("two"))
    raw = GenerateRequest(id="raw", model="chat", sampling=Sampling(max_tokens=1), prompts=["text"])
    assert sticky_key(raw) == "raw"
