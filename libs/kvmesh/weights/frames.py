"""Messages between a weights process and its parent, as frames on the process's pipes."""

from typing import BinaryIO, TypeAlias

import msgspec
from msgspec import Struct

HEADER_BYTES = 4
MAX_FRAME = 4 << 20
DISK, STORE = "disk", "store"  # sources that are no workers


class WeightsJob(Struct, frozen=True, kw_only=True, tag="job"):
    """The first message of the parent: a worker's settings as environment variables, and its model.

    `model` is the name in the API, `folder` the model folder, with or without weights. The answer
    for the engine's loader goes to `answer_file`; unless it is to `take` weights, that is the
    disk. A process that takes over from one that has died gets the `digest` of that one's answer,
    and whether the engine has `loaded` its weights already. `pinned` is the digest of the manifest
    of the weights if the model comes from the model store.
    """

    env: dict[str, str]
    name: str
    instance: str
    model: str
    folder: str
    revision: str = ""
    node: str = ""
    answer_file: str
    digest: str = ""
    pinned: str = ""
    loaded: bool = False
    take: bool = True


class EngineRuns(Struct, frozen=True, tag="runs"):
    """The parent's engine has loaded its weights and started."""


class ServingReport(Struct, frozen=True, tag="serving"):
    """Summary of what the parent has served since its last report.

    `gaps` counts times between tokens of one request; a tenth of them were longer than `slow_s`
    seconds. `transfers`: KV blocks are being read from or by the parent now.
    """

    gaps: int = 0
    slow_s: float = 0.0
    transfers: bool = False


class CopyWanted(Struct, frozen=True, tag="want"):
    """The parent wants the copy with this digest in the node's store within `timeout_s` seconds."""

    digest: str
    timeout_s: float


class CopyOffered(Struct, frozen=True, tag="offer"):
    """The parent has put the copy with this digest into the store, for other workers."""

    digest: str


class CopyWithdrawn(Struct, frozen=True, tag="withdraw"):
    """The parent offers the copy with this digest no more; no answer follows."""

    digest: str


class CopyReady(Struct, frozen=True, tag="ready"):
    """The answer to the first two: it is in the store and offered, unless there is a `reason`."""

    digest: str
    reason: str = ""


class WeightsKnown(Struct, frozen=True, tag="known"):
    """The digest of the manifest of the worker's weights, for its card."""

    digest: str


class WeightsTaken(Struct, frozen=True, tag="taken"):
    """A copy is complete: bytes by source, an instance, "disk" or "store", and its seconds.

    What the sources have not sent of its `size` was in the node's memory. `direct`
    of the bytes came through NIXL.
    """

    digest: str
    seconds: float
    sources: dict[str, int]
    size: int = 0
    direct: int = 0


class WeightsFromDisk(Struct, frozen=True, tag="disk"):
    """The engine loads the weights from its folder, for a reason."""

    reason: str


class WeightsCounts(Struct, frozen=True, kw_only=True, tag="counts"):
    """Counts since the start: bytes taken, by "peer", "disk" or "store", and sent to others.

    `failed` counts requests for chunks by the reason of their failure, `sources` the workers from
    which weights come now.
    """

    taken: dict[str, int] = {}
    sent: int = 0
    failed: dict[str, int] = {}
    sources: int = 0


class SubjectsRefused(Struct, frozen=True, tag="refused"):
    """The subjects that the NATS server refuses the weights process, each with a line of text."""

    texts: dict[str, str]


ParentMessage: TypeAlias = (
    WeightsJob | EngineRuns | ServingReport | CopyWanted | CopyOffered | CopyWithdrawn
)
WeightsEvent: TypeAlias = (
    WeightsKnown | WeightsTaken | WeightsFromDisk | WeightsCounts | SubjectsRefused | CopyReady
)
_encode = msgspec.msgpack.Encoder().encode
decode_parent_message = msgspec.msgpack.Decoder(ParentMessage).decode
decode_event = msgspec.msgpack.Decoder(WeightsEvent).decode


def frame(message: Struct) -> bytes:
    """A message with its length."""
    body = _encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame, None at the end; blocks. Raises ValueError if it is too long."""
    header = source.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    size = int.from_bytes(header, "big")
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    body = source.read(size)
    return body if len(body) == size else None
