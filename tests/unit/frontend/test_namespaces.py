"""Tags, salts and scoped names of tenants."""

import pytest

from kvmesh.bus.messages import Hints, owner
from kvmesh.frontend.namespaces import (
    TenantNamespaces,
    certain_conversation,
    inferred,
    scope_sessions,
    scoped,
)
from kvmesh.hashing import salt


def test_names_of_a_tenant_cannot_be_formed_outside_of_it() -> None:
    assert scoped("team", "s") == "team\x1fs"
    assert scoped("", "team\x1fs") == "teams"
    assert scoped("team", "\x1fs") == "team\x1fs"
    names = {inferred("team", "s"), inferred("", "s"), scoped("team", "s"), scoped("", "s")}
    assert len(names) == 4


def test_a_conversation_is_certain_in_a_session_that_the_caller_names() -> None:
    assert certain_conversation(Hints(session=scoped("team", "s"), conversation=7)) == 7
    assert certain_conversation(Hints(session=inferred("team", "s"), conversation=7)) == 0
    assert certain_conversation(Hints(conversation=7)) == 0


def test_tags_are_keyed_and_distinguish_owners_and_their_parts() -> None:
    tenants, others = TenantNamespaces(bytes(32)), TenantNamespaces(b"x" * 32)
    made = {tenants.tag("a"), tenants.tag("a", "b"), tenants.tag("", "a"), tenants.tag("ab")}
    assert len(made | {others.tag("a"), tenants.tag("a\x1fb")}) == 6
    assert all(len(tag) >= 32 for tag in made)
    assert owner(tenants.tag("a", "b")) == owner(tenants.tag("a", "c")) == tenants.tag("a")
    assert owner(tenants.tag("", "a")) == tenants.tag("") == ""


def test_tags_and_salts_of_tenants_require_the_secret() -> None:
    tenants = TenantNamespaces()
    assert tenants.salt("m", "", "") == salt("m")
    with pytest.raises(RuntimeError, match="secret"):
        tenants.tag("a")
    with pytest.raises(RuntimeError, match="secret"):
        tenants.salt("m", "", "a")


def test_sessions_are_scoped_to_their_tenant() -> None:
    hints = scope_sessions(Hints(session="s", parent_session="p"), "team")
    assert (hints.session, hints.parent_session) == ("team\x1fs", "team\x1fp")
    assert scope_sessions(Hints(session="s"), "") == Hints(session="s")
    assert scope_sessions(Hints(), "team") == Hints()
