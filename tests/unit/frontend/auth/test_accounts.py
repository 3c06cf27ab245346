"""API keys, their limits, scopes and bounds."""

import hashlib
from typing import Any

import pytest
from unit.frontend.apis.bodies import request

from kvmesh.frontend.auth.accounts import Account, Accounts, Key
from kvmesh.frontend.errors import ApiError


def key(secret: str = "s", **fields: Any) -> Key:
    return Key(name="k", sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def test_only_holders_of_a_key_are_found() -> None:
    accounts = Accounts()
    accounts.replace([key("right")], 0.0)
    assert accounts.authenticate("right").key.name == "k"
    for secret in (None, "", "wrong"):
        with pytest.raises(ApiError) as error:
            accounts.authenticate(secret)
        assert error.value.kind == "authentication"


def test_requests_per_minute_refill_with_time() -> None:
    account = Account(key(requests_per_minute=2), 0.0)
    account.enter(0.0)
    account.enter(0.0)
    with pytest.raises(ApiError) as error:
        account.enter(0.0)
    assert error.value.kind == "rate_limit"
    assert error.value.retry_after == pytest.approx(30)
    account.enter(30.0)


def test_tokens_are_paid_back_before_the_next_request() -> None:
    account = Account(key(tokens_per_minute=60), 0.0)
    account.enter(0.0)
    account.charge_tokens(100)
    with pytest.raises(ApiError) as error:
        account.enter(1.0)
    assert error.value.retry_after == pytest.approx(40)
    account.enter(42.0)


def test_concurrency_counts_what_runs() -> None:
    account = Account(key(concurrency=1), 0.0)
    account.enter(0.0)
    with pytest.raises(ApiError):
        account.enter(0.0)
    account.leave()
    account.enter(0.0)


def test_a_key_bounds_models_and_priority() -> None:
    account = Account(key(models=["m"], max_priority=1, tenant="t"), 0.0)
    made = request(nvext={"agent_hints": {"priority": 9, "strict_priority": 4}})
    account.authorize(made)
    assert (made.hints.priority, made.hints.strict_priority) == (1, 1)
    made.model = "other"
    with pytest.raises(ApiError) as error:
        account.authorize(made)
    assert error.value.kind == "permission"


def test_a_changed_list_keeps_what_the_same_keys_have_used() -> None:
    accounts = Accounts()
    accounts.replace([key("a", concurrency=1), key("b")], 0.0)
    accounts.authenticate("a").enter(0.0)
    accounts.replace([key("a", concurrency=1)], 1.0)
    with pytest.raises(ApiError):
        accounts.authenticate("a").enter(1.0)
    with pytest.raises(ApiError):
        accounts.authenticate("b")


def test_scopes_are_what_a_key_may_do_besides() -> None:
    with pytest.raises(ApiError) as error:
        Account(key(), 0.0).require_scope("cache")
    assert (error.value.kind, error.value.code) == ("permission", "scope_missing")
    Account(key(scopes=["cache"]), 0.0).require_scope("cache")
    Account(key(scopes=["admin"]), 0.0).require_scope("cache")
    with pytest.raises(ApiError):
        Account(key(scopes=["cache"]), 0.0).require_scope("admin")
