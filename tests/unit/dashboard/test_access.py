"""Access to the dashboard: keys, sessions of browsers, origins."""

import pytest
from support.dashboard_keys import Clock, KeyRing

from kvmesh.dashboard.http.access import (
    ATTEMPTS_PER_MIN,
    COOKIE,
    MOST_SIGNED_IN,
    SIGNED_IN_S,
    Access,
)
from kvmesh.frontend.errors import ApiError


@pytest.fixture
def clock() -> Clock:
    return Clock()


def access(clock: Clock, keys: KeyRing, local: bool = True) -> Access:
    return Access(keys, local, clock)


def status(access: Access, websocket: bool = False, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return access.judge("GET", {"host": "127.0.0.1:8090", **named}, websocket).status


def cookie(token: str) -> str:
    return f"other=1; {COOKIE}={token}"


def test_a_key_needs_the_scope_admin(clock: Clock) -> None:
    own = access(clock, KeyRing(root=["admin"], user=["cache"]))
    assert status(own) == 401
    assert status(own, authorization="Bearer nonsense") == 401
    assert status(own, authorization="Bearer user") == 403
    assert status(own, authorization="Bearer root") == 0
    assert status(own, x_api_key="root") == 0


def test_a_browser_that_signed_in_passes_until_it_signs_out(clock: Clock) -> None:
    own = access(clock, KeyRing(root=["admin"]))
    token = own.sign_in(" root\n")
    assert token is not None
    assert status(own, cookie=cookie(token)) == 0
    assert status(own, cookie=cookie(token + "x")) == 401
    own.sign_out({"cookie": cookie(token)})
    assert status(own, cookie=cookie(token)) == 401


def test_a_session_ends_after_its_time(clock: Clock) -> None:
    own = access(clock, KeyRing(root=["admin"]))
    token = own.sign_in("root")
    assert token is not None
    clock.now += SIGNED_IN_S + 1
    assert status(own, cookie=cookie(token)) == 401


def test_a_session_ends_with_its_key(clock: Clock) -> None:
    keys = KeyRing(root=["admin"])
    own = access(clock, keys)
    token = own.sign_in("root")
    assert token is not None
    keys.set(root=["cache"])
    assert status(own, cookie=cookie(token)) == 403
    keys.set(other=["admin"])
    assert status(own, cookie=cookie(token)) == 401


@pytest.mark.parametrize("secret", ["", "user", "x" * 10_000, "root\0"])
def test_other_keys_do_not_sign_in(clock: Clock, secret: str) -> None:
    assert access(clock, KeyRing(root=["admin"], user=[])).sign_in(secret) is None


def test_attempts_are_limited_but_not_for_ever(clock: Clock) -> None:
    own = access(clock, KeyRing(root=["admin"]))
    for _ in range(ATTEMPTS_PER_MIN):
        assert own.sign_in("guess") is None
    with pytest.raises(ApiError, match="Too many attempts"):
        own.sign_in("root")
    clock.now += 61
    assert own.sign_in("root") is not None


def test_the_attempts_of_a_stranger_lock_nobody_else_out(clock: Clock) -> None:
    own = access(clock, KeyRing(root=["admin"]))
    for _ in range(ATTEMPTS_PER_MIN):
        own.sign_in("guess", "203.0.113.9")
    with pytest.raises(ApiError):
        own.sign_in("root", "203.0.113.9")
    assert own.sign_in("root", "198.51.100.7") is not None


def test_malformed_cookies_of_other_services_on_the_host_do_no_harm(clock: Clock) -> None:
    own = access(clock, KeyRing(root=["admin"]))
    token = own.sign_in("root")
    assert token is not None
    assert status(own, cookie='state={"a": 1}; x; =;' + cookie(token)) == 0


def test_the_number_of_sessions_is_bounded(clock: Clock) -> None:
    own = access(clock, KeyRing(root=["admin"]))
    first = own.sign_in("root")
    assert first is not None
    for _ in range(MOST_SIGNED_IN):
        own.sign_in("root")
    assert status(own, cookie=cookie(first)) == 401


def test_without_keys_only_pages_of_this_machine_pass(clock: Clock) -> None:
    own = access(clock, KeyRing())
    assert status(own) == 0
    assert status(own, host="localhost:8090") == 0
    assert status(own, host="evil.example") == 403, "a name that was bound again to loopback"
    assert status(own, origin="http://evil.example") == 403
    assert status(own, sec_fetch_site="cross-site") == 403
    assert status(own, x_forwarded_for="1.2.3.4") == 403


def test_anyone_passes_if_the_operator_allows_it(clock: Clock) -> None:
    own = access(clock, KeyRing(), local=False)
    assert status(own, host="mesh.example") == 0


@pytest.mark.parametrize("keys", [KeyRing(), KeyRing(root=["admin"])])
def test_a_websocket_is_opened_by_this_page_alone(clock: Clock, keys: KeyRing) -> None:
    own = access(clock, keys, local=False)
    key = {"x_api_key": "root"}
    assert status(own, websocket=True, origin="http://127.0.0.1:8090", **key) == 0
    assert status(own, websocket=True, origin="http://127.0.0.1:9999", **key) == 403
    assert status(own, websocket=True, origin="null", **key) == 403
    assert status(own, websocket=True, origin="http://[", **key) == 403


@pytest.mark.parametrize("value", ['kvmesh_dashboard="', "=;;=", "\x00", f"{COOKIE}=" + "a" * 9999])
def test_a_malformed_cookie_is_no_session(clock: Clock, value: str) -> None:
    assert status(access(clock, KeyRing(root=["admin"])), cookie=value) == 401
