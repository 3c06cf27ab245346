"""Requests inside an engine core, and the progress of each as a sequence."""

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvmesh.hashing import HASH_BYTES, TOKEN_BYTES, block_hashes, sequence_hashes
from kvmesh.worker.enginecore.backward_load import BackwardLoad
from kvmesh.worker.enginecore.retention_request import RetentionRequest


class TokenSource(Protocol):
    """An output that is known in advance: a pure function of the token's offset."""

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens `start` … `stop - 1` of the output."""
        ...


@dataclass(kw_only=True, slots=True)
class Request:
    """A prompt as hashed blocks, and the tokens of its partial last block (packed uint32).

    The KV of the first `remote_tokens` tokens comes from another worker. The output is `source` up
    to token `target` and ends with `finish`; its first `generated` tokens are the last ones of the
    prompt. Higher priority goes first. `retention` claims blocks; blocks are shared only within
    `tenant`. Those of an `ephemeral` request are not stored in lower tiers.
    """

    id: str
    length: int
    local_hashes: bytes
    sequence_hashes: bytes
    tail: bytes
    source: TokenSource
    target: int
    finish: str = "length"
    generated: int = 0
    salt: int = 0
    tenant: str = ""
    priority: int = 0
    remote_tokens: int = 0
    retention: RetentionRequest | None = None
    ephemeral: bool = False


def hash_prompt(tokens: bytes, block_size: int, salt: int) -> tuple[bytes, bytes, bytes]:
    """Local hashes, sequence hashes and tail of a prompt (packed uint32), as in `Request`."""
    local, sequence = block_hashes(tokens, block_size, salt)
    return local, sequence, tokens[len(local) // HASH_BYTES * block_size * TOKEN_BYTES :]


class SequenceState(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class Sequence:
    """The progress of a request, with `full_blocks` locked full blocks and `private_blocks` others.

    Of the private ones, `ahead_blocks` are filled by `arriving`, the load of blocks further back.
    The least `sort_key` is scheduled first, the greatest preempted first. `cached` is the cached
    prompt tokens by tier; the sequence was first admitted at `admitted_at`. The claims on the first
    `claimed_blocks` blocks are applied. While the sequence decodes, its state is that at step
    `synced_step` of the batch; at `end_step` the output is complete, and at `due_step` a block is
    full or the output complete.
    """

    __slots__ = (
        "admitted_at",
        "ahead_blocks",
        "arrival",
        "arriving",
        "block_size",
        "cached",
        "cached_reported",
        "claimed_blocks",
        "computed",
        "due_step",
        "end_step",
        "free_slots",
        "full_blocks",
        "generated",
        "local_hashes",
        "private_blocks",
        "prompt_length",
        "ready_at",
        "request",
        "sequence_hashes",
        "sort_key",
        "state",
        "synced_step",
    )

    def __init__(self, request: Request, arrival: int, block_size: int) -> None:
        self.request = request
        self.arrival = arrival
        self.sort_key = -request.priority, arrival
        self.block_size = block_size
        self.prompt_length = request.length - request.generated
        self.generated = request.generated
        self.local_hashes = array("Q", request.local_hashes)
        self.sequence_hashes = array("Q", request.sequence_hashes)
        self.state = SequenceState.WAITING
        self.cached: list[int] | None = None
        self.admitted_at = 0.0
        self.ready_at = 0.0
        self.cached_reported = False
        self.claimed_blocks = 0
        self.computed = 0
        self.full_blocks = 0
        self.private_blocks = 0
        self.ahead_blocks = 0
        self.arriving: BackwardLoad | None = None
        self.free_slots = 0
        self.synced_step = 0
        self.due_step = self.end_step = -1

    @property
    def length(self) -> int:
        """Tokens known so far: the prompt and the generated ones."""
        return self.prompt_length + self.generated

    @property
    def remaining(self) -> int:
        """Tokens of the output that are not generated yet."""
        return self.request.target - self.generated

    @property
    def awaits_blocks(self) -> bool:
        """True if blocks from a kvbm are awaited or loaded."""
        return self.state is SequenceState.LOADING or self.arriving is not None

    def advance(self, clock: int) -> None:
        """Apply the decode steps from `synced_step` up to the batch's step count `clock`."""
        steps = clock - self.synced_step
        self.generated += steps
        self.computed += steps
        self.free_slots -= steps
        self.synced_step = clock

    @property
    def reusable(self) -> "array[int]":
        """Hashes of the blocks that may come from a cache: at least one token must be computed."""
        return self.sequence_hashes[: (self.length - 1) // self.block_size]

    def blocks_needed(self, computed: int) -> int:
        """Private blocks to allocate before the first `computed` tokens are in memory."""
        front = self.private_blocks - self.ahead_blocks
        return -(-computed // self.block_size) - self.full_blocks - front

    def rehash(self, first: int, seed: int) -> None:
        """Replace the hashes of the blocks from `first` on by a chain that starts from `seed`."""
        fresh = sequence_hashes(self.local_hashes[first:].tobytes(), seed)
        self.sequence_hashes[first:] = array("Q", fresh)

    def hash_blocks(self, blocks: int) -> None:
        """Compute the hashes of the first `blocks` full blocks, generated tokens included."""
        while len(self.sequence_hashes) < blocks:
            previous = self.sequence_hashes[-1] if self.sequence_hashes else self.request.salt
            start = len(self.sequence_hashes) * self.block_size
            head = self.request.tail if start < self.request.length else b""
            first = max(start, self.request.length) - self.prompt_length
            rest = self.request.source.slice(first, start + self.block_size - self.prompt_length)
            tokens = head + array("I", rest).tobytes()
            local, sequence = block_hashes(tokens, self.block_size, previous)
            self.local_hashes.frombytes(local)
            self.sequence_hashes.frombytes(sequence)
