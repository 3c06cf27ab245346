"""Who asks and for how much: session headers of every harness, hints, API keys and limits."""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
from multidict import CIMultiDict

from kvmesh.bus.messages import Hints, owner
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.nvext import MOST_IGNORED
from kvmesh.frontend.apis.request_hints import session_in, session_of
from kvmesh.frontend.auth.accounts import Account, Accounts, Key
from kvmesh.frontend.auth.authenticator import Authenticator, KeysError, read_keys, secret_of
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.namespaces import TenantNamespaces, inferred, scope_sessions, scoped
from kvmesh.hashing import salt
from kvmesh.router.placement.fair_order import fair_class


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


def test_a_thousand_fields_without_effect_are_named_at_most() -> None:
    fields: dict[str, Any] = {f"f{n}": n for n in range(5000)}
    made = request(nvext={"extra_fields": ["ignored"]}, **fields)
    assert len(made.ignored) == len(set(made.ignored)) == MOST_IGNORED


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


def test_a_key_bounds_models_and_priority() -> None:
    account = Account(key(models=["m"], max_priority=1, tenant="t"), 0.0)
    made = request(nvext={"agent_hints": {"priority": 9, "strict_priority": 4}})
    account.check(made)
    assert (made.hints.priority, made.hints.strict_priority) == (1, 1)
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
    assert scoped("team", "\x1fs") == "team\x1fs"
    names = {inferred("team", "s"), inferred("", "s"), scoped("team", "s"), scoped("", "s")}
    assert len(names) == 4


def test_a_tag_is_keyed_and_tells_owners_and_their_parts_apart() -> None:
    tenants, others = TenantNamespaces(bytes(32)), TenantNamespaces(b"x" * 32)
    made = {tenants.tag("a"), tenants.tag("a", "b"), tenants.tag("", "a"), tenants.tag("ab")}
    assert len(made | {others.tag("a"), tenants.tag("a\x1fb")}) == 6
    assert all(len(tag) >= 32 for tag in made)
    assert owner(tenants.tag("a", "b")) == owner(tenants.tag("a", "c")) == tenants.tag("a")
    assert owner(tenants.tag("", "a")) == tenants.tag("") == ""


def test_without_the_secret_no_tenant_has_a_namespace() -> None:
    tenants = TenantNamespaces()
    assert tenants.salt("m", "", "") == salt("m")
    with pytest.raises(RuntimeError, match="secret"):
        tenants.tag("a")
    with pytest.raises(RuntimeError, match="secret"):
        tenants.salt("m", "", "a")


BAD_NAMES = ["x" * 129, "a b", "a\tb", "\u00e4", "a\x1fb"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_callers_call_themselves_is_bounded(name: str) -> None:
    with pytest.raises(InvalidRequest, match="visible ASCII"):
        request(nvext={"cache_salt": name})
    for header in ("x-tenant-id", "x-kvmesh-fair-class"):
        with pytest.raises(InvalidRequest, match=header):
            request(CIMultiDict({header: name}))


def bound(key: Key | None, head: CIMultiDict[str], local: bool = True, **body: Any) -> Any:
    made = request(head, **body)
    gate = Authenticator(
        cast(Any, None), None, use_bucket=False, local=local, tenants=TenantNamespaces(bytes(32))
    )
    gate.bind(made, None if key is None else Account(key, 0.0))
    return made


def test_the_class_is_that_of_the_key_and_headers_only_divide_it() -> None:
    premium = headers(x_kvmesh_fair_class="premium", x_tenant_id="other")
    made = bound(key(tenant="t"), premium)
    assert (made.hints.tenant, made.hints.fair_class) == ("t", "premium")
    assert fair_class(made.hints).startswith("t\x1f")
    assert bound(key(tenant="t", fair_class="gold"), premium).hints.tenant == "gold"
    assert fair_class(bound(key(), premium).hints) == "\x1fpremium"
    assert fair_class(bound(None, premium).hints) == "premium"
    assert fair_class(bound(None, headers(x_tenant_id="other")).hints) == "other"


def test_every_hint_of_urgency_is_capped_by_the_key() -> None:
    urgent = {"agent_hints": {"priority": 9, "strict_priority": 4, "latency_sensitivity": 1.0}}

    def hints(**fields: Any) -> tuple[int, int, float]:
        made = bound(key(**fields), headers(), nvext=urgent).hints
        return made.priority, made.strict_priority, made.latency_sensitivity

    assert hints() == (0, 0, 0.0)
    assert hints(max_latency_sensitivity=0.5) == (0, 0, 0.5)
    assert hints(max_priority=0) == (0, 0, 0.0)
    assert hints(max_priority=2) == (2, 2, 1.0)
    assert hints(max_priority=2, max_latency_sensitivity=0.5) == (2, 2, 0.5)


STEERING: list[dict[str, Any]] = [
    {"policy": "random"},
    {"router_config_override": {"prefill_weight": 0}},
    {"backend_instance_id": "w-1"},
    {"dp_rank": 1},
    {"routing_constraints": {"exclude": ["w-1"]}},
    {"routing_constraints": {"allow": ["w-1"]}},
]


@pytest.mark.parametrize("nvext", STEERING)
def test_a_key_needs_a_scope_to_steer_the_router(nvext: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        bound(key(), headers(), nvext=nvext)
    assert (error.value.kind, error.value.code) == ("permission", "scope_missing")
    with pytest.raises(ApiError, match="routing"):
        bound(None, headers(), local=False, nvext=nvext)
    for allowed in (key(scopes=["routing"]), key(scopes=["admin"]), None):
        bound(allowed, headers(), nvext=nvext)


def test_labels_steer_nobody() -> None:
    bound(key(), headers(), nvext={"routing_constraints": {"labels": {"zone": "a"}}})


def test_sessions_of_a_tenant_are_named_within_it() -> None:
    hints = scope_sessions(Hints(session="s", parent_session="p"), "team")
    assert (hints.session, hints.parent_session) == ("team\x1fs", "team\x1fp")
    assert scope_sessions(Hints(session="s"), "") == Hints(session="s")
    assert scope_sessions(Hints(), "team") == Hints()
