"""API keys, their limits, scopes and bounds."""

import hashlib
from typing import Any

import pytest
from unit.frontend.apis.bodies import request

from kvmesh.frontend.auth.accounts import Account, Accounts, Key
from kvmesh.frontend.errors import ApiError


def key(secret: str = "s", **fields: Any) -> Key:
    return Key(name="k", sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def test_only_a_valid_secret_finds_an_account() -> None:
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


def test_tokens_leak_before_the_next_request_is_admitted() -> None:
    account = Account(key(tokens_per_minute=60), 0.0)
    account.enter(0.0)
    account.charge_tokens(100)
    with pytest.raises(ApiError) as error:
        account.enter(1.0)
    assert error.value.retry_after == pytest.approx(40)
    account.enter(42.0)


def test_concurrency_counts_running_requests() -> None:
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


def test_a_changed_list_preserves_the_use_of_its_keys() -> None:
    accounts = Accounts()
    accounts.replace([key("a", concurrency=1), key("b")], 0.0)
    accounts.authenticate("a").enter(0.0)
    accounts.replace([key("a", concurrency=1)], 1.0)
    with pytest.raises(ApiError):
        accounts.authenticate("a").enter(1.0)
    with pytest.raises(ApiError):
        accounts.authenticate("b")


def test_a_scope_permits_its_actions_and_admin_all() -> None:
    with pytest.raises(ApiError) as error:
        Account(key(), 0.0).require_scope("cache")
    assert (error.value.kind, error.value.code) == ("permission", "scope_missing")
    Account(key(scopes=["cache"]), 0.0).require_scope("cache")
    Account(key(scopes=["admin"]), 0.0).require_scope("cache")
    with pytest.raises(ApiError):
        Account(key(scopes=["cache"]), 0.0).require_scope("admin")


def test_a_rotated_key_preserves_its_account_and_accepts_the_old_secret_for_a_while() -> None:
    accounts = Accounts()
    accounts.replace([key(concurrency=1)], 0.0)
    accounts.authenticate("s").enter(0.0)
    after = key("new", concurrency=1, old_sha256=key().sha256, old_until=100.0)
    accounts.replace([after], 0.0)
    assert accounts.authenticate("new", 99.0) is accounts.authenticate("s", 99.0)
    with pytest.raises(ApiError):
        accounts.authenticate("new", 99.0).enter(0.0)
    with pytest.raises(ApiError):
        accounts.authenticate("s", 100.0)


def test_a_key_expires() -> None:
    accounts = Accounts()
    accounts.replace([key(expires=10.0)], 0.0)
    assert accounts.authenticate("s", 9.0).key.name == "k"
    with pytest.raises(ApiError):
        accounts.authenticate("s", 10.0)
