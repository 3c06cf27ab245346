"""One request inside an engine: what is to be computed, and how far that has come."""

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvmesh.hashing import HASH_BYTES, TOKEN_BYTES, block_hashes, sequence_hashes
from kvmesh.worker.enginecore.retention_request import RetentionRequest


class TokenSource(Protocol):
    """The answer, known beforehand: a pure function of the token's place in it."""

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens `start` … `stop - 1` of the answer."""
        ...


@dataclass(kw_only=True, slots=True)
class Request:
    """A prompt as hashed blocks plus the tokens of its unfinished last block (packed uint32).

    The KV of the first `remote` tokens comes from another worker instead of being computed. The
    answer is `source` up to token `target`, ending with `finish`; its first `generated` tokens
    are the last ones of the prompt. Higher priority goes first. `asked` is for its blocks,
    which are shared within `tenant` alone.
    """

    id: str
    length: int
    local: bytes
    sequence_hashes: bytes
    tail: bytes
    source: TokenSource
    target: int
    finish: str = "length"
    generated: int = 0
    salt: int = 0
    tenant: str = ""
    priority: int = 0
    remote: int = 0
    asked: RetentionRequest | None = None


def hash_prompt(tokens: bytes, block_size: int, salt: int) -> tuple[bytes, bytes, bytes]:
    """Local hashes, sequence hashes and tail of a prompt (packed uint32), as in `Request`."""
    local, sequence = block_hashes(tokens, block_size, salt)
    return local, sequence, tokens[len(local) // HASH_BYTES * block_size * TOKEN_BYTES :]


class SequenceState(Enum):
    WAITING = "waiting"
    ARRIVING = "arriving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class Sequence:
    """A request's progress. `held` full blocks and `private` unfinished ones are in its name.

    It sorts by `rank`: the least goes first, the greatest is the first to be preempted.

    What it asks for its first `asked_to` blocks has been noted. While it decodes, its state is that
    at step `synced` of the batch; at step `end` the answer is complete, at step `due` something
    must be done for it.
    """

    __slots__ = (
        "arrival",
        "asked_to",
        "base",
        "block_size",
        "cached",
        "computed",
        "due",
        "end",
        "generated",
        "held",
        "local",
        "private",
        "rank",
        "ready_at",
        "request",
        "room",
        "sequence",
        "state",
        "synced",
        "told_cached",
    )

    def __init__(self, request: Request, arrival: int, block_size: int) -> None:
        self.request = request
        self.arrival = arrival
        self.rank = -request.priority, arrival
        self.block_size = block_size
        self.base = request.length - request.generated
        self.generated = request.generated
        self.local = array("Q", request.local)
        self.sequence = array("Q", request.sequence_hashes)
        self.state = SequenceState.WAITING
        self.cached: list[int] | None = None
        self.ready_at = 0.0
        self.told_cached = False
        self.asked_to = 0
        self.computed = 0
        self.held = 0
        self.private = 0
        self.room = 0
        self.synced = 0
        self.due = self.end = -1

    @property
    def length(self) -> int:
        """Tokens known so far: the prompt and what was generated."""
        return self.base + self.generated

    @property
    def missing(self) -> int:
        """Tokens of the answer that are not generated yet."""
        return self.request.target - self.generated

    def advance(self, clock: int) -> None:
        """Write down the decode steps since `synced`, up to the batch's step count `clock`."""
        steps = clock - self.synced
        self.generated += steps
        self.computed += steps
        self.room -= steps
        self.synced = clock

    @property
    def reusable(self) -> "array[int]":
        """Hashes of the blocks that may come from the cache: at least one token is computed."""
        return self.sequence[: (self.length - 1) // self.block_size]

    def blocks_for(self, computed: int) -> int:
        """Private blocks to allocate before `computed` tokens are in memory."""
        return -(-computed // self.block_size) - self.held - self.private

    def rename(self, first: int, seed: int) -> None:
        """Give the blocks from `first` on other hashes, beginning with `seed`."""
        fresh = sequence_hashes(self.local[first:].tobytes(), seed)
        self.sequence[first:] = array("Q", fresh)

    def hash_to(self, blocks: int) -> None:
        """Know the hashes of the first `blocks` full blocks, generated ones included."""
        while len(self.sequence) < blocks:
            previous = self.sequence[-1] if self.sequence else self.request.salt
            tokens = self._block_tokens(len(self.sequence))
            local, sequence = block_hashes(tokens, self.block_size, previous)
            self.local.frombytes(local)
            self.sequence.frombytes(sequence)

    def _block_tokens(self, block: int) -> bytes:
        start = block * self.block_size
        head = self.request.tail if start < self.request.length else b""
        first = max(start, self.request.length) - self.base
        rest = self.request.source.slice(first, start + self.block_size - self.base)
        return head + array("I", rest).tobytes()
