"""Who asks and for how much: session headers of every harness, hints, API keys and limits."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from kvmesh.bus.messages import Hints
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.gate import KeysError, read_keys, secret_of
from kvmesh.frontend.limits import Account, Accounts, Key
from kvmesh.frontend.surfaces.chat import Chat
from kvmesh.frontend.surfaces.hints import session_in, session_of
from kvmesh.frontend.tenants import apart, salted, scoped


def headers(**named: str) -> CIMultiDict[str]:
    return CIMultiDict({name.replace("_", "-"): value for name, value in named.items()})


def request(head: CIMultiDict[str] | None = None, **fields: Any) -> Any:
    sent = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return Chat().parse(json.dumps(sent).encode(), head or headers()).request


SESSIONS = [
    (headers(), None, None),
    (headers(X_KVMesh_Session_ID="a", X_KVMesh_Parent_Session_ID="b"), "a", "b"),
    (headers(x_dynamo_session_id="a"), "a", None),
    (headers(X_Claude_Code_Session_Id="s"), "s", None),
    (headers(x_claude_code_session_id="s", x_claude_code_agent_id="x"), "s/x", "s"),
    (
        headers(
            x_claude_code_session_id="s",
            x_claude_code_agent_id="x",
            x_claude_code_parent_agent_id="p",
        ),
        "s/x",
        "s/p",
    ),
    (headers(session_id="c"), "c", None),
    (headers(session_id="c", thread_id="t", x_codex_parent_thread_id="p"), "t", "p"),
    (headers(x_session_id="o", x_parent_session_id="p"), "o", "p"),
    (headers(x_session_affinity="o"), "o", None),
]


@pytest.mark.parametrize(("head", "session", "parent"), SESSIONS)
def test_every_harness_names_its_session(
    head: CIMultiDict[str], session: str | None, parent: str | None
) -> None:
    assert session_of(head) == (session, parent)


def test_a_session_hides_in_claude_code_s_user_id() -> None:
    assert session_in('{"device_id":"d","session_id":"s"}') == "s"
    assert session_in("user_abc") is None
    assert session_in("{broken") is None


def test_headers_win_over_the_body() -> None:
    head = headers(
        x_kvmesh_priority="7", x_kvmesh_worker_instance_id="w", x_tenant_id="t", x_session_id="s"
    )
    nvext = {"agent_hints": {"priority": 1, "osl": 99}, "cache_salt": "x", "dp_rank": 2}
    made = request(head, nvext=nvext, prompt_cache_key="k")
    assert (made.hints.priority, made.hints.osl, made.hints.session) == (7, 99, "s")
    assert (made.placement.instance, made.placement.rank) == ("w", 2)
    assert made.cache_salt == "t"


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


def test_what_has_no_effect_is_listed_when_asked_for() -> None:
    nvext = {"extra_fields": ["ignored"], "annotations": ["x"], "novel": 1}
    made = request(nvext=nvext, verbosity="low", temperature=0.5)
    assert made.ignored == ["verbosity", "nvext.annotations", "nvext.novel"]


def test_a_bad_header_is_named() -> None:
    with pytest.raises(InvalidRequest, match="x-kvmesh-priority"):
        request(headers(x_kvmesh_priority="high"))


# --- keys ---


def key(secret: str = "s", **fields: Any) -> Key:
    return Key(name="k", sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def test_only_holders_of_a_key_are_found() -> None:
    accounts = Accounts()
    accounts.replace([key("right")], 0.0)
    assert accounts.find("right").key.name == "k"
    for secret in (None, "", "wrong"):
        with pytest.raises(ApiError) as error:
            accounts.find(secret)
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
    account.spend(100)
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


def test_a_key_bounds_models_priority_and_tenant() -> None:
    account = Account(key(models=["m"], max_priority=1, tenant="t"), 0.0)
    made = request(nvext={"agent_hints": {"priority": 9, "strict_priority": 4}})
    account.check(made)
    assert (made.hints.priority, made.hints.strict_priority) == (1, 1)
    assert made.cache_salt == "t"
    own = request(headers(x_tenant_id="x"))
    account.check(own)
    assert own.cache_salt not in ("t", "x")
    made.model = "other"
    with pytest.raises(ApiError) as error:
        account.check(made)
    assert error.value.kind == "permission"


def test_a_changed_list_keeps_what_the_same_keys_have_used() -> None:
    accounts = Accounts()
    accounts.replace([key("a", concurrency=1), key("b")], 0.0)
    accounts.find("a").enter(0.0)
    accounts.replace([key("a", concurrency=1)], 1.0)
    with pytest.raises(ApiError):
        accounts.find("a").enter(1.0)
    with pytest.raises(ApiError):
        accounts.find("b")


def test_a_keys_file_is_read_or_its_fault_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{key().sha256}"\nconcurrency = 3\n')
    assert read_keys(file)[0].concurrency == 3
    file.write_text('[[key]]\nname = "a"\nsha256 = "short"\n')
    with pytest.raises(KeysError, match="sha256"):
        read_keys(file)
    with pytest.raises(KeysError, match=r"gone\.toml"):
        read_keys(tmp_path / "gone.toml")


def test_a_key_comes_as_either_vendor_s_clients_send_it() -> None:
    assert secret_of(headers(authorization="Bearer abc")) == "abc"
    assert secret_of(headers(x_api_key="abc")) == "abc"
    assert secret_of(headers(authorization="Basic abc")) is None


def test_scopes_are_what_a_key_may_do_besides() -> None:
    with pytest.raises(ApiError) as error:
        Account(key(), 0.0).require("cache")
    assert (error.value.kind, error.value.code) == ("permission", "scope_missing")
    Account(key(scopes=["cache"]), 0.0).require("cache")
    Account(key(scopes=["admin"]), 0.0).require("cache")
    with pytest.raises(ApiError):
        Account(key(scopes=["cache"]), 0.0).require("admin")


# --- tenants ---


def test_nobody_can_name_what_belongs_to_a_tenant() -> None:
    assert scoped("team", "s") == "team\x1fs"
    assert scoped("", "team\x1fs") == "teams"
    assert salted("team", "") == "team"
    own = {salted(None, "team"), salted("team", ""), salted("team", "x"), salted("", "team\x1fx")}
    assert len(own) == 4


def test_sessions_of_a_tenant_are_named_within_it() -> None:
    hints = apart(Hints(session="s", parent_session="p"), "team")
    assert (hints.session, hints.parent_session) == ("team\x1fs", "team\x1fp")
    assert apart(Hints(session="s"), "") == Hints(session="s")
    assert apart(Hints(), "team") == Hints()
