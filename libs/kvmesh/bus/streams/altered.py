"""Settings under which a stream does not store what a mesh needs: operators may alter any. Pure."""

from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType, convert
from msgspec.json import Decoder
from nats.js.api import StreamConfig

from kvmesh.bus.subjects import ROOT

MIN_MESSAGE = 1 << 20  # bytes that a stream has to accept
REMAKE = "delete it, and it is made anew"
SECOND = 1_000_000_000  # nanoseconds, in which the server gives times
# The ends of the names of buckets whose entries stay until the mesh removes them.
PERMANENT = frozenset(
    ["catalog", "keys", "kvbm", "modelstore", "plan", "router", "secrets", "weights"]
)


class FoundStream(Struct):
    """The settings of a stream in the server's JSON that can do harm; a limit below 1 is none."""

    name: str = ""
    subjects: list[str] | None = None
    retention: str = "limits"
    discard: str = "old"
    max_age: int = 0  # ns
    max_bytes: int = -1
    max_msgs: int = -1
    max_msg_size: int = -1
    sealed: bool = False
    no_ack: bool = False
    mirror: object | UnsetType = UNSET
    sources: list[object] | None = None
    subject_transform: object | UnsetType = UNSET

    @property
    def is_bucket(self) -> bool:
        return self.name.startswith(("KV_", "OBJ_"))

    @property
    def is_permanent(self) -> bool:
        return self.is_bucket and self.name.rpartition("-")[2] in PERMANENT

    @property
    def needed_subject(self) -> str:
        """The subject that the stream of a mesh stores, or one of those of an object store."""
        kind, _, bucket = self.name.partition("_")
        if kind == "KV":
            return f"$KV.{bucket}.>"
        if kind == "OBJ":
            return f"$O.{bucket}.C.>"
        namespace, _, events = self.name.removeprefix(f"{ROOT}-").rpartition("-")
        return f"{ROOT}.{namespace}.{events}.>"


decoder = Decoder(FoundStream)


def found_stream(config: StreamConfig) -> FoundStream:
    """The same, from nats-py's form."""
    return convert(config.as_dict(), FoundStream)


def harm(has: FoundStream) -> Iterator[str]:
    """Each setting that does harm, as the end of a sentence about the stream, with a remedy."""
    if has.mirror is not UNSET:
        yield f"is a mirror, which stores nothing of its own: {REMAKE}"
        return
    if has.sealed:
        yield f"is sealed, and stores nothing: {REMAKE}"
        return
    if has.needed_subject not in (has.subjects or ()):
        yield f"does not store messages on {has.needed_subject}: {REMAKE}"
    if has.retention != "limits":
        yield f"drops messages once they are read (retention {has.retention}): {REMAKE}"
    if has.sources:
        yield "takes in what others have stored, such as removed keys: remove its sources"
    if has.no_ack:
        yield "acknowledges nothing: set no_ack to false"
    if has.subject_transform is not UNSET:
        yield "stores messages on other subjects: remove subject_transform"
    if 0 < has.max_msg_size < MIN_MESSAGE:
        yield f"refuses messages of more than {has.max_msg_size} bytes: set max_msg_size to -1"
    if has.max_age > 0 and has.is_permanent:
        yield f"drops its entries after {has.max_age / SECOND:.15g} s: set max_age to 0"
    if has.max_msgs > 0 and has.is_bucket:
        yield f"stores at most {has.max_msgs} entries: set max_msgs to -1"
    if has.discard == "new" and not has.is_bucket:
        yield "refuses messages once it is full: set discard to old"
