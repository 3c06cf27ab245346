"""The permissions of each role on the bus: exactly the subjects that its processes use.

`kvmesh secure` writes them into a NATS server's configuration. Under such a server no process can
use a subject, stream or bucket without an owner here; a test finds those.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvmesh.bus.messages import Role
from kvmesh.bus.subjects import API, Subjects, through, token

ANY = "%"  # wildcard token of a subject; no name may contain it


class User(StrEnum):
    """The roles that have credentials: the services, and those of people and tools."""

    FRONTEND = "frontend"
    ROUTER = "router"
    INDEXER = "indexer"
    WORKER = "worker"
    KVBM = "kvbm"
    PLANNER = "planner"
    OPERATOR = "operator"
    OBSERVER = "observer"
    DASHBOARD = "dashboard"


@dataclass(frozen=True)
class Permissions:
    """Subject patterns."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(user: str) -> str:
    """The prefix of one user's reply subjects, to which no other user may subscribe."""
    return f"_INBOX.{token(user)}"


def permissions(
    subjects: Subjects, role: User, user: str, name: str = ANY, api: str = API
) -> Permissions:
    """The permissions of a user in a role; its processes are called `name` unless that is ANY.

    `api` is the prefix of the JetStream API that holds the mesh.
    """
    publish, subscribe = _TABLE[role](subjects, name)
    stream_infos = (f"{API}.STREAM.INFO.{stream}" for stream in _startup_streams(subjects))
    replies = () if role in _NO_SERVERS else INBOXES
    published = (*publish, *stream_infos, *replies, *_LIBRARY)
    return Permissions(
        tuple(sorted({through(api, _pattern(subject)) for subject in published})),
        tuple(sorted({*map(_pattern, subscribe), f"{inbox_prefix(user)}.>"})),
    )


def covers(pattern: str, subject: str) -> bool:
    """True if a pattern matches a subject, or all that another matches, in upper or lower case."""
    parts, tokens = pattern.casefold().split("."), subject.casefold().split(".")
    if parts[-1] == ">" and len(tokens) >= len(parts):
        parts, tokens = parts[:-1], tokens[: len(parts) - 1]
    return len(parts) == len(tokens) and all(
        part == each or (part == "*" and each != ">")
        for part, each in zip(parts, tokens, strict=True)
    )


def sample_of(pattern: str) -> str:
    """A subject that a pattern covers and that no process uses."""
    sample = f"probe-{secrets.token_hex(4)}"
    return ".".join(sample if part in ("*", ">") else part for part in pattern.split("."))


def _pattern(subject: str) -> str:
    return subject.replace(token(ANY), "*")


Grant = tuple[Iterable[str], Iterable[str]]
# Of a user about itself, and of an account about its servers and connections.
USER_INFO, ALL_SERVERS = "$SYS.REQ.USER.INFO", "$SYS.REQ.ACCOUNT.PING.CONNZ"
# requested by nats-py, and by a process that checks its permissions; they reveal no message
_LIBRARY = (f"{API}.INFO", f"{API}.STREAM.NAMES", USER_INFO)
_EACH = f"{ANY}-{ANY}"  # any instance
_NO_SERVERS = (User.OPERATOR, User.OBSERVER, User.DASHBOARD)  # they serve no requests
# Replies go to these only. `allow_responses` of NATS permits any subject that a request names for
# its reply, so a user that sends a request to itself could publish anywhere. Inboxes are random: a
# user cannot guess another's.
INBOXES = ("_INBOX.>",)


def _frontend(s: Subjects, name: str) -> Grant:
    own = f"{name}-{ANY}"
    stores = (
        *(s.responses_bucket, s.answers_bucket, s.pins_bucket, s.secrets_bucket),
        s.batches_bucket,
    )
    return (
        [
            *(s.router(ANY), s.router_at(ANY, _EACH), s.work(_EACH), s.ctl(_EACH), s.ping(_EACH)),
            *(s.sessions, s.limits, s.traces, s.seq(ANY), s.route(ANY), s.wake(ANY)),
            s.tool(ANY),
            *_lease(s, User.FRONTEND, name),
            *_lease(s, User.WORKER, ANY),  # to delete leases and records of dead workers
            *_lease(s, Role.PARKED, ANY),
            *(entry for bucket in stores for entry in _write(bucket)),
            *_write_objects(s.files_bucket),
            f"{API}.STREAM.MSG.DELETE.{_objects(s.files_bucket)}",
            f"$KV.{s.router_bucket}.{s.busy_key(ANY)}",
            f"{API}.STREAM.PURGE.{_kv(s.responses_bucket)}",  # a response has several keys
            *_reads(_kv(s.instances_bucket), _kv(s.keys_bucket), _objects(s.model_bucket)),
            *_reads(_objects(s.files_bucket)),
            *_reads(*map(_kv, stores), _kv(s.plan_bucket), _kv(s.router_bucket)),
            *_creates(*_streams(s)),
        ],
        [s.out(own), s.ask(own), s.sessions, s.limits, s.traces],
    )


def _router(s: Subjects, name: str) -> Grant:
    own = f"{name}-{ANY}"
    return (
        [
            *(s.index(ANY), s.index_shard(ANY, ANY), s.index_at(_EACH), s.seq(ANY), s.route(ANY)),
            *(s.returns(_EACH), s.adapters(_EACH)),
            *_lease(s, User.ROUTER, name),
            *_reads(s.seq_stream, s.route_stream),
            *_reads(_kv(s.router_bucket), _kv(s.instances_bucket)),
        ],
        [
            *(s.router(ANY), s.router_at(ANY, own), s.ask(own), s.ping(own)),
            *(s.load_all, s.tool_all, s.traces, s.seq_all),
        ],
    )


def _indexer(s: Subjects, name: str) -> Grant:
    own, snapshots = f"{name}-{ANY}", _objects(s.index_bucket)
    queries = (s.index_all, s.index_shard(ANY, ANY), s.index_at(own), s.index_part_at(own))
    return (
        [
            *(s.index(ANY), s.index_shard(ANY, ANY), s.dump(_EACH)),
            *(s.index_at(_EACH), s.index_part_at(_EACH)),
            *_lease(s, User.INDEXER, name),
            *_write_objects(s.index_bucket),
            *_reads(s.kv_stream, snapshots, _kv(s.instances_bucket)),
            *(f"{API}.STREAM.PURGE.{stream}" for stream in (s.kv_stream, snapshots)),
        ],
        [*queries, s.ask(own), s.load_all, s.traces],
    )


def _worker(s: Subjects, name: str) -> Grant:
    own = f"{name}-{ANY}"
    return (
        [
            *(s.kv(ANY, name), s.load(own), s.starting(own)),
            *(s.out(_EACH), s.kvbm(_EACH), s.ping(_EACH), s.weights(ANY)),
            *_lease(s, User.WORKER, name),
            *_lease(s, Role.PARKED, name),
            *_write(s.weights_bucket),
            *_write_objects(s.model_bucket),
            f"{API}.STREAM.MSG.DELETE.{_objects(s.model_bucket)}",  # manifests of former weights
            *_reads(_kv(s.instances_bucket), _objects(s.model_bucket), _kv(s.weights_bucket)),
            *_reads(_objects(s.model_store_bucket), _kv(s.catalog_bucket)),
        ],
        [
            *(s.work(own), s.ctl(own), s.adapters(own), s.dump(own), s.ping(own)),
            *(s.weights(ANY), s.traces),
            s.returns(own),  # of the former release alone, which is unready where it is refused
        ],
    )


def _kvbm(s: Subjects, name: str) -> Grant:
    own = f"{name}-{ANY}"
    return (
        [
            *(s.kv(ANY, name), s.kvbm(_EACH), s.index(ANY)),
            *(s.computing(ANY), s.computing_before(_EACH)),
            *_lease(s, User.KVBM, name),
            *_write(s.kvbm_bucket),
            *_reads(_kv(s.instances_bucket), _kv(s.kvbm_bucket)),
        ],
        [
            *(s.kvbm(own), s.ctl(own), s.returns(own), s.dump(own), s.traces),
            *(s.computing(ANY), s.computing_before(own)),
        ],
    )


def _planner(s: Subjects, name: str) -> Grant:
    streams = (s.route_stream, s.seq_stream, s.scaling_stream)
    return (
        [
            *(s.scaling(ANY), s.ctl(_EACH)),
            *_lease(s, User.PLANNER, name),
            *_write(s.plan_bucket),
            *_reads(*streams, _kv(s.instances_bucket), _kv(s.plan_bucket)),
        ],
        [s.load_all, s.starting_all, s.wake_all, s.ping(f"{name}-{ANY}"), s.traces],
    )


def _observer(s: Subjects, name: str) -> Grant:
    streams = _seen_streams(s)
    lists = (f"{API}.STREAM.LIST", *(f"{API}.CONSUMER.LIST.{stream}" for stream in streams))
    return [*lists, *_reads(*streams, deletes=False), ALL_SERVERS], _events(s)


def _dashboard(s: Subjects, name: str) -> Grant:
    """It sees as much as an observer and lists no consumers, so it may delete its own."""
    stores = (_kv(s.keys_bucket), _kv(s.pins_bucket))
    return (
        [
            *(s.index(ANY), s.index_shard(ANY, ANY), s.index_at(_EACH)),
            *_reads(*_seen_streams(s), *stores),
        ],
        [*_events(s), s.traces],
    )


def _operator(s: Subjects, name: str) -> Grant:
    buckets = [n.removeprefix("KV_") for n in _streams(s) if n.startswith("KV_")]
    objects = [n.removeprefix("OBJ_") for n in _streams(s) if n.startswith("OBJ_")]
    return (
        [
            *(s.ctl(_EACH), s.ask(_EACH), s.weights(ANY), f"{API}.>", "$JS.FC.>"),
            ALL_SERVERS,
            *(entry for bucket in buckets for entry in _write(bucket)),
            *(entry for bucket in objects for entry in _write_objects(bucket)),
        ],
        _events(s),
    )


_TABLE: dict[User, Callable[[Subjects, str], Grant]] = {
    User.FRONTEND: _frontend,
    User.ROUTER: _router,
    User.INDEXER: _indexer,
    User.WORKER: _worker,
    User.KVBM: _kvbm,
    User.PLANNER: _planner,
    User.OPERATOR: _operator,
    User.OBSERVER: _observer,
    User.DASHBOARD: _dashboard,
}


def _events(s: Subjects) -> list[str]:
    """The subjects of events, loads, starts, wakes and tools: neither tokens nor prompts."""
    streams = [s.kv_all, s.route_all, s.seq_all, s.scaling_all]
    return [*streams, s.load_all, s.starting_all, s.wake_all, s.tool_all]


def _seen_streams(s: Subjects) -> list[str]:
    """The streams of those who only look: events, cards and the plan."""
    events = (s.kv_stream, s.route_stream, s.seq_stream, s.scaling_stream)
    return [*events, _kv(s.instances_bucket), _kv(s.plan_bucket)]


def _startup_streams(s: Subjects) -> list[str]:
    """The streams that each process ensures at its start."""
    buckets = (s.instances_bucket, s.router_bucket, s.kvbm_bucket, s.plan_bucket, s.weights_bucket)
    objects = (s.index_bucket, s.model_bucket)
    streams = (s.kv_stream, s.route_stream, s.seq_stream, s.scaling_stream)
    return [*streams, *map(_kv, buckets), *map(_objects, objects)]


def _streams(s: Subjects) -> list[str]:
    """Every stream of a mesh, including those of its buckets."""
    stores = (
        *(s.keys_bucket, s.pins_bucket, s.responses_bucket, s.answers_bucket),
        *(s.secrets_bucket, s.catalog_bucket, s.batches_bucket),
    )
    objects = (s.model_store_bucket, s.files_bucket)
    return [*_startup_streams(s), *map(_kv, stores), *map(_objects, objects)]


def _kv(bucket: str) -> str:
    return f"KV_{bucket}"


def _objects(bucket: str) -> str:
    return f"OBJ_{bucket}"


def _lease(s: Subjects, role: User | Role, name: str) -> list[str]:
    return [f"$KV.{s.instances_bucket}.{s.lease_key(role, f'{name}-{ANY}')}"]


def _write(bucket: str) -> list[str]:
    return [f"$KV.{bucket}.>"]


def _write_objects(bucket: str) -> list[str]:
    """Writing chunks and descriptions; replacing an object purges its chunks."""
    return [f"$O.{bucket}.>", f"{API}.STREAM.PURGE.{_objects(bucket)}"]


def _reads(*streams: str, deletes: bool = True) -> list[str]:
    """Reading from streams; with `deletes`, deleting a consumer instead of letting it expire.

    Consumers have random names: only a user that may list them could delete those of others.
    """
    return [subject for stream in streams for subject in _read(stream, deletes)]


def _read(stream: str, deletes: bool) -> list[str]:
    """Without direct reads, which deliver stored messages unchanged to any named subject."""
    calls = (
        *(f"STREAM.INFO.{stream}", f"STREAM.MSG.GET.{stream}"),
        *(f"CONSUMER.CREATE.{stream}", f"CONSUMER.CREATE.{stream}.>"),
        *((f"CONSUMER.DELETE.{stream}.*",) if deletes else ()),
    )
    # the newer layout has a domain and an account before the stream
    return [*(f"{API}.{call}" for call in calls), f"$JS.FC.{stream}.>", f"$JS.FC.*.*.{stream}.>"]


def _creates(*streams: str) -> list[str]:
    """Creating a missing stream; only operators change and delete streams."""
    return [f"{API}.STREAM.{call}.{stream}" for stream in streams for call in ("CREATE", "INFO")]
