"""The form of a recorded stream: messages of an engine, and look-ups in its cache between them."""

import gzip
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

FOLDER = Path(__file__).parents[2] / "data" / "events"


class Message(Struct, tag=True, array_like=True):
    """One payload as published: the msgpack of `[time, [events], data-parallel rank]`."""

    payload: bytes


class Lookup(Struct, tag=True, array_like=True):
    """A prompt of the mesh (by its number), and the tokens that the engine finds in each tier.

    `salt` is the mesh's. The tokens of a tier follow those of the tiers above it.
    """

    prompt: int
    salt: int
    tiers: list[int]


class Restart(Struct, tag=True, array_like=True):
    """The engine has restarted: the subscriber reports it before the next message."""


Step = Message | Lookup | Restart


class Stream(Struct):
    """One life of a cache; `counted` and `tenants` are as the worker of this engine has them.

    `model` is the name of which the mesh makes its salts. `tenants`: prompts of tenants are served.
    """

    engine: str
    version: str
    mode: str
    how: str
    block_size: int
    model: str
    counted: bool
    tenants: bool = False
    prompts: list[bytes] = []
    steps: list[Step] = []


class StreamWriter:
    """Collects the steps of one stream."""

    def __init__(self, **about: Any) -> None:
        self.stream = Stream(**about)
        self._numbers: dict[bytes, int] = {}

    def message(self, payload: bytes) -> None:
        self.stream.steps.append(Message(payload))

    def restart(self) -> None:
        self.stream.steps.append(Restart())

    def lookup(self, tokens: list[int], salt: int, *tiers: int) -> None:
        packed = array("I", tokens).tobytes()
        number = self._numbers.setdefault(packed, len(self._numbers))
        if number == len(self.stream.prompts):
            self.stream.prompts.append(packed)
        row = [*tiers, 0, 0, 0, 0][:4]
        self.stream.steps.append(Lookup(number, salt, row))

    def record(self, lives: int, live: Callable[[], None]) -> None:
        """Write the stream of so many lives of a cache, which restarts before each further one."""
        for number in range(lives):
            if number:
                self.restart()
            live()
        path = self.write()
        print(f"{path.name}: {len(self.stream.steps)} steps, {path.stat().st_size} bytes")

    def write(self) -> Path:
        """Write the stream to its file, the same bytes for the same steps."""
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / f"{self.stream.engine}-{self.stream.mode}.gz"
        path.write_bytes(gzip.compress(msgspec.msgpack.encode(self.stream), mtime=0))
        return path


def stream_files() -> list[Path]:
    return sorted(FOLDER.glob("*.gz"))


def read_stream(path: Path) -> Stream:
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Stream)
