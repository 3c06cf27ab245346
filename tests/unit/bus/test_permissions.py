"""The table of permissions: nothing on the bus is without an owner, and secrets have few."""

import inspect
from collections.abc import Iterator

import pytest

from kvmesh.bus.permissions import (
    ANY,
    Permissions,
    User,
    covers,
    inbox_prefix,
    permissions,
    sample_of,
)
from kvmesh.bus.subjects import Subjects, api_of

SUBJECTS = Subjects("ns")
ELSEWHERE = {"expand", "parse", "owns", "everything", "namespace"}  # no names of their own


def names() -> Iterator[tuple[str, str]]:
    """Every subject and bucket of the mesh, for sample arguments."""
    for name, member in inspect.getmembers(Subjects):
        if name.startswith("_") or name in ELSEWHERE:
            continue
        if isinstance(member, property):
            yield name, getattr(SUBJECTS, name)
        else:
            samples = ["n-1" for _ in list(inspect.signature(member).parameters)[1:]]
            yield name, getattr(SUBJECTS, name)(*samples)


NAMES = dict(names())


def matches(pattern: str, subject: str) -> bool:
    parts, tokens = pattern.split("."), subject.split(".")
    if parts[-1] == ">":
        return len(tokens) >= len(parts) and matches(
            ".".join(parts[:-1]), ".".join(tokens[: len(parts) - 1])
        )
    return len(parts) == len(tokens) and all(
        p in ("*", t) for p, t in zip(parts, tokens, strict=True)
    )


def granted(role: User, name: str = ANY) -> Permissions:
    return permissions(SUBJECTS, role, role, name)


def publishers(subject: str) -> set[User]:
    return {r for r in User if any(matches(p, subject) for p in granted(r).publish)}


def listeners(subject: str) -> set[User]:
    return {r for r in User if any(matches(p, subject) for p in granted(r).subscribe)}


def test_every_subject_has_publishers_and_subscribers() -> None:
    plain = {n: s for n, s in NAMES.items() if not n.endswith(("_stream", "_bucket", "_key"))}
    orphans = {
        name
        for name, subject in plain.items()
        if not listeners(subject) or not (publishers(subject) or name.endswith("_all"))
    }
    assert orphans == set()


def test_every_stream_has_a_reader_and_a_creator() -> None:
    streams = {n: s for n, s in NAMES.items() if n.endswith("_stream")}
    for name, stream in streams.items():
        assert publishers(f"$JS.API.CONSUMER.CREATE.{stream}") - {User.OPERATOR}, name
        creators = {User.FRONTEND, User.OPERATOR}
        assert publishers(f"$JS.API.STREAM.CREATE.{stream}") == creators, name


def test_every_bucket_has_a_reader_a_writer_and_a_creator() -> None:
    buckets = {n: b for n, b in NAMES.items() if n.endswith("_bucket")}
    for name, bucket in buckets.items():
        objects = name in ("index_bucket", "model_bucket", "model_store_bucket", "files_bucket")
        stream = f"{'OBJ' if objects else 'KV'}_{bucket}"
        entry = f"$O.{bucket}.C.x" if objects else f"$KV.{bucket}.worker.n.1"
        assert publishers(entry), name
        assert publishers(f"$JS.API.CONSUMER.CREATE.{stream}.x.{entry}") - {User.OPERATOR}, name
        assert publishers(f"$JS.API.DIRECT.GET.{stream}.{entry}") == {User.OPERATOR}, name
        creators = {User.FRONTEND, User.OPERATOR}
        assert publishers(f"$JS.API.STREAM.CREATE.{stream}") == creators, name


@pytest.mark.parametrize("role", User)
def test_only_an_operator_changes_or_deletes_streams(role: User) -> None:
    for call in ("UPDATE", "DELETE", "RESTORE", "SNAPSHOT"):
        for stream in (SUBJECTS.kv_stream, f"KV_{SUBJECTS.keys_bucket}"):
            asked = role in publishers(f"$JS.API.STREAM.{call}.{stream}")
            assert asked == (role is User.OPERATOR)


@pytest.mark.parametrize("role", User)
def test_no_user_subscribes_to_the_replies_of_others(role: User) -> None:
    for other in {*User} - {role}:
        assert role not in listeners(f"{inbox_prefix(other)}.x.1")
    assert role in listeners(f"{inbox_prefix(role)}.x.1")


@pytest.mark.parametrize("role", User)
def test_only_roles_that_serve_requests_may_reply(role: User) -> None:
    asked = role not in (User.OPERATOR, User.OBSERVER, User.DASHBOARD)
    assert (role in publishers(f"{inbox_prefix(User.FRONTEND)}.x.1")) == asked


def test_two_users_of_one_role_have_separate_inboxes() -> None:
    one = permissions(SUBJECTS, User.WORKER, "worker.a", "a").subscribe
    all_workers = permissions(SUBJECTS, User.WORKER, "worker").subscribe
    for patterns in (one, all_workers):
        assert not any(matches(p, f"{inbox_prefix('worker.b')}.x.1") for p in patterns)


@pytest.mark.parametrize("name", ["worker-0", "gpu.example-1", "0"])
def test_a_named_worker_has_only_its_own_subjects(name: str) -> None:
    own = permissions(SUBJECTS, User.WORKER, f"worker.{name}", name)
    life = f"{name}-4f2a11ce"
    other = f"{name}-0-4f2a11ce"
    for subject in (SUBJECTS.work, SUBJECTS.ctl):
        assert any(matches(p, subject(life)) for p in own.subscribe)
        assert not any(matches(p, subject(other)) for p in own.subscribe)
    for instance, may in ((life, True), (other, False)):
        lease = f"$KV.{SUBJECTS.instances_bucket}.{SUBJECTS.lease_key('worker', instance)}"
        assert any(matches(p, lease) for p in own.publish) == may
        assert any(matches(p, SUBJECTS.load(instance)) for p in own.publish) == may
    assert any(matches(p, SUBJECTS.kv("m", name)) for p in own.publish)
    assert not any(matches(p, SUBJECTS.kv("m", f"{name}-0")) for p in own.publish)


@pytest.mark.parametrize(
    ("pattern", "covered", "others"),
    [
        ("a.*.c", ["a.b.c", "A.x.C"], ["a.c", "a.b.b.c", "a.b.d"]),
        ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
        ("a.b", ["a.b", "A.B"], ["a", "a.b.c"]),
        ("a.>", ["a.*.c", "a.>"], []),
        ("a.*", ["a.*"], ["a.>", "*.b"]),
    ],
)
def test_a_pattern_covers_its_subjects_in_any_case(
    pattern: str, covered: list[str], others: list[str]
) -> None:
    assert all(covers(pattern, subject) for subject in covered)
    assert not any(covers(pattern, subject) for subject in others)
    assert covers(pattern, sample_of(pattern))
    assert ("probe-" in sample_of(pattern)) == (pattern != "a.b")


def test_readers_may_answer_flow_control_in_both_layouts() -> None:
    for role, stream in ((User.INDEXER, SUBJECTS.kv_stream), (User.ROUTER, SUBJECTS.seq_stream)):
        patterns = granted(role).publish
        for subject in (f"$JS.FC.{stream}.c.x1", f"$JS.FC._.hash.{stream}.c.x1"):
            assert any(matches(pattern, subject) for pattern in patterns), (role, subject)


def test_a_mesh_in_another_domain_is_reached_through_its_api() -> None:
    """Leaf nodes keep `$KV` and `$JS.API` to their own domain, and pass on the others."""
    here = permissions(SUBJECTS, User.WORKER, "worker")
    there = permissions(SUBJECTS, User.WORKER, "worker", api=api_of("hub"))
    moved = {
        subject.replace("$JS.API.", "$JS.hub.API.").replace("$KV.", "$JS.hub.API.$KV.")
        for subject in here.publish
    }
    assert set(there.publish) == moved
    assert there.subscribe == here.subscribe
    assert any(subject.startswith("$O.") for subject in there.publish)
