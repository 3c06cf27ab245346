"""Settings under which a stream does not store what a mesh needs: operators may alter any. Pure."""

from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType, convert
from msgspec.json import Decoder
from nats.js.api import StreamConfig

from kvmesh.bus.subjects import ROOT

MIN_MESSAGE = 1 << 20  # bytes that a stream has to accept
REMAKE = "delete it, and it is made anew"
ALL = ">"
SECOND = 1_000_000_000  # nanoseconds, in which the server gives times
SHORTEST_S = 10.0  # within which readers have read what is stored, or learn that it is gone
FEWEST_READERS = 500
# Ends of the names of buckets: those whose entries stay until the mesh removes them, those whose
# entries nobody replaces, and those that drop entries to make room.
PERMANENT = frozenset(
    (
        *("catalog", "index", "keys", "kvbm", "models", "modelstore"),
        *("plan", "router", "secrets", "weights"),
    )
)
WRITE_ONCE = frozenset(["secrets", "weights"])
EVICTING = frozenset(["answers", "responses"])
OWN_ROOTS = frozenset([ROOT, "$KV", "$O", "*", ">"])
# Third tokens of the subjects of requests: a stream acknowledges each, as if that were the reply.
REQUESTS = frozenset(
    (
        *("adapters", "ask", "ctl", "dump", "index", "indexer", "kvbm", "oracle"),
        *("ping", "returns", "router", "sessions", "weights", "work"),
    )
)


class _Republished(Struct):
    dest: str = ""


class FoundStream(Struct):
    """The settings of a stream in the server's JSON that can do harm; a limit below 1 is none."""

    name: str = ""
    subjects: list[str] | None = None
    retention: str = "limits"
    discard: str = "old"
    discard_new_per_subject: bool = False
    max_age: int = 0  # ns
    max_bytes: int = -1
    max_consumers: int = -1
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    max_msg_size: int = -1
    allow_rollup_hdrs: bool = False
    consumer_limits: dict[str, int] | None = None
    deny_delete: bool = False
    deny_purge: bool = False
    sealed: bool = False
    no_ack: bool = False
    mirror: object | UnsetType = UNSET
    sources: list[object] | None = None
    subject_transform: object | UnsetType = UNSET
    republish: _Republished | None = None

    @property
    def is_bucket(self) -> bool:
        return self.name.startswith(("KV_", "OBJ_"))

    @property
    def is_object_store(self) -> bool:
        return self.name.startswith("OBJ_")

    @property
    def kind(self) -> str:
        return self.name.rpartition("-")[2]

    @property
    def is_permanent(self) -> bool:
        return self.is_bucket and self.kind in PERMANENT

    @property
    def own_subjects(self) -> list[str]:
        """The subjects that the stream of a mesh stores."""
        kind, _, bucket = self.name.partition("_")
        if kind == "KV":
            return [f"$KV.{bucket}.>"]
        if kind == "OBJ":
            return [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"]
        namespace, _, events = self.name.removeprefix(f"{ROOT}-").rpartition("-")
        return [f"{ROOT}.{namespace}.{events}.>"]


decoder = Decoder(FoundStream)


def found_stream(config: StreamConfig) -> FoundStream:
    """The same, from nats-py's form."""
    return convert(config.as_dict(), FoundStream)


def answered(has: FoundStream, namespace: str) -> Iterator[str]:
    """As `harm`, for a stream of others: its subjects on which it answers a mesh's requests."""
    for subject in has.subjects or () if not has.no_ack else ():
        first, last = subject.split(".")[:3], subject.endswith("." + ALL) or subject == ALL
        places = zip(first, ([ROOT], [namespace], REQUESTS), strict=False)
        inside = all(part in own or part in ("*", ALL) for part, own in places)
        if inside and (last or len(first) == 3):
            yield answers_on(subject)


def answers_on(subject: str) -> str:
    return f"stores what is sent on {subject}, too, and answers requests there: remove that subject"


def harm(has: FoundStream) -> Iterator[str]:
    """Each setting that does harm, as the end of a sentence about the stream, with a remedy."""
    if has.mirror is not UNSET:
        yield f"is a mirror, which stores nothing of its own: {REMAKE}"
    elif has.sealed:
        yield f"is sealed, and stores nothing: {REMAKE}"
    else:
        yield from _astray(has)
        yield from _refused(has)
        yield from _dropped(has)
        yield from _kept(has)


def _astray(has: FoundStream) -> Iterator[str]:
    """Messages that do not get where they belong, or come from elsewhere."""
    own, found = has.own_subjects, has.subjects or ()
    if missing := [subject for subject in own if subject not in found]:
        yield f"does not store messages on {missing[0]}: {REMAKE}"
    elif others := [subject for subject in found if subject not in own]:
        yield answers_on(others[0])
    if has.sources:
        yield "takes in what others have stored, such as removed keys: remove its sources"
    if has.subject_transform is not UNSET:
        yield "stores messages on other subjects: remove subject_transform"
    if has.republish is not None and has.republish.dest.split(".")[0] in OWN_ROOTS:
        yield f"sends what it stores to the mesh's own {has.republish.dest}: remove republish"


def _refused(has: FoundStream) -> Iterator[str]:
    """Messages and readers that the stream does not accept."""
    if has.no_ack:
        yield "acknowledges nothing: set no_ack to false"
    if 0 < has.max_msg_size < MIN_MESSAGE:
        yield f"refuses messages of more than {has.max_msg_size} bytes: set max_msg_size to -1"
    if has.discard == "new" and not has.is_bucket:
        yield "refuses messages once it is full: set discard to old"
    if has.is_object_store and not has.allow_rollup_hdrs:
        yield "refuses descriptions of objects: set allow_rollup_hdrs to true"
    if 0 < has.max_consumers < FEWEST_READERS:
        yield f"permits only {has.max_consumers} readers: raise max_consumers"
    if has.consumer_limits:
        yield "limits what readers may ask for: remove consumer_limits"


def _dropped(has: FoundStream) -> Iterator[str]:
    """Messages that are gone too early."""
    age = f"{has.max_age / SECOND:.15g} s"
    if has.retention != "limits":
        yield f"drops messages once they are read (retention {has.retention}): {REMAKE}"
    if has.max_age > 0 and has.is_permanent:
        yield f"drops its entries after {age}: set max_age to 0"
    elif 0 < has.max_age < SHORTEST_S * SECOND and not has.is_bucket:
        yield f"drops messages after {age}, before all have read them: raise max_age"
    if has.max_msgs > 0:
        does = "stores at most" if has.is_bucket else "drops all but the last"
        yield f"{does} {has.max_msgs} entries: set max_msgs to -1"
    if has.max_msgs_per_subject > 0 and (has.is_object_store or not has.is_bucket):
        number = has.max_msgs_per_subject
        yield f"drops all but the last {number} on each subject: set max_msgs_per_subject to -1"
    if 0 < has.max_bytes < MIN_MESSAGE and not has.is_bucket:
        yield f"drops what exceeds {has.max_bytes} bytes in total: raise max_bytes"
    if has.discard == "old" and has.is_bucket and has.kind not in EVICTING:
        yield "drops its oldest entries once it is full: set discard to new"


def _kept(has: FoundStream) -> Iterator[str]:
    """Messages that cannot be removed, or can be replaced."""
    if has.deny_purge and not has.is_bucket:
        yield f"lets nobody remove what indexers have in their snapshots: {REMAKE}"
    if has.deny_delete and has.is_object_store:
        yield f"lets nobody remove objects: {REMAKE}"
    if has.kind == "instances" and has.max_age < 1:
        yield "keeps the cards of dead processes: set max_age to 10 s"
    if has.kind in WRITE_ONCE and has.is_bucket and not has.discard_new_per_subject:
        yield "lets its entries be replaced: set discard_new_per_subject to true"
