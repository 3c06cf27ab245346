"""Keys files, secrets in headers, and what a key permits a request."""

from pathlib import Path
from typing import Any, cast

import pytest
from multidict import CIMultiDict
from unit.frontend.apis.bodies import headers, request
from unit.frontend.auth.test_accounts import key

from kvmesh.frontend.auth.accounts import Account, Key
from kvmesh.frontend.auth.authenticator import Authenticator, KeysError, read_keys, secrets_of
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.router.state.fair_classes import fair_class


def test_a_keys_file_is_read_or_its_error_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{key().sha256}"\nconcurrency = 3\n')
    assert read_keys(file)[0].concurrency == 3
    file.write_text('[[key]]\nname = "a"\nsha256 = "short"\n')
    with pytest.raises(KeysError, match="sha256"):
        read_keys(file)
    with pytest.raises(KeysError, match=r"gone\.toml"):
        read_keys(tmp_path / "gone.toml")


def test_a_secret_is_read_from_the_header_of_either_vendor() -> None:
    assert secrets_of(headers(authorization="Bearer abc")) == ["abc"]
    assert secrets_of(headers(x_api_key="abc")) == ["abc"]
    assert secrets_of(headers(authorization="Basic abc")) == []


def bound(key: Key | None, head: CIMultiDict[str], local: bool = True, **body: Any) -> Any:
    made = request(head, **body)
    gate = Authenticator(
        cast(Any, None), None, use_bucket=False, local=local, tenants=TenantNamespaces(bytes(32))
    )
    gate.bind(made, None if key is None else Account(key, 0.0))
    return made


def test_the_key_sets_the_fair_class_and_headers_subdivide_it() -> None:
    premium = headers(x_kvmesh_fair_class="premium", x_tenant_id="other")
    made = bound(key(tenant="t"), premium)
    assert (made.hints.tenant, made.hints.fair_class) == ("t", "premium")
    assert fair_class(made.hints).startswith("t\x1f")
    assert bound(key(tenant="t", fair_class="gold"), premium).hints.tenant == "gold"
    assert fair_class(bound(key(), premium).hints) == "\x1fpremium"
    assert fair_class(bound(None, premium).hints) == "premium"
    assert fair_class(bound(None, headers(x_tenant_id="other")).hints) == "other"


def test_the_key_bounds_every_priority_hint() -> None:
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
def test_controlling_the_router_requires_a_scope(nvext: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        bound(key(), headers(), nvext=nvext)
    assert (error.value.kind, error.value.code) == ("permission", "scope_missing")
    with pytest.raises(ApiError, match="routing"):
        bound(None, headers(), local=False, nvext=nvext)
    for allowed in (key(scopes=["routing"]), key(scopes=["admin"]), None):
        bound(allowed, headers(), nvext=nvext)


def test_labels_require_no_scope() -> None:
    bound(key(), headers(), nvext={"routing_constraints": {"labels": {"zone": "a"}}})
