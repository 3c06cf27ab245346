"""What the workers of a node and its kvbm say to each other: one message per request or batch.

Block bytes never travel in these: a worker copies between its engine and the arena that it maps.
All are arrays, which grow at the end only. Digests are packed, 16 bytes each; hashes, offsets and
checksums are packed little-endian uint64, one per block. Every request goes to
`Subjects.kvbm(instance)` and is answered by one of the replies named with it, or by `Declined`.

A *ticket* stands for blocks that a worker uses. Until it is given back they are neither evicted
nor overwritten. The tickets of a worker that is gone are given back when its lock is free: it holds
an exclusive `flock` on a file of its own in the node's directory for as long as it is attached.

`Offer` and `Fetch` describe a whole prompt, but need not repeat it: with `base`, the last digest of
a prompt that the kvbm was told of under the same attachment, the blocks are the first `shared` of
that one and then those in the message. A kvbm that does not have it any more answers `Incomplete`
and has done nothing; it is then told all. `first` and `held` count from the root in any case.
"""

from typing import TypeAlias

from msgspec import Struct

from kvmesh.bus.messages.layout import KvLayout
from kvmesh.bus.messages.work import Retain


class Attach(Struct, frozen=True, array_like=True, tag="attach"):
    """A worker is here, holding the lock file `lock` in the directory. Answer: `Attached`.

    Again after a restart of either side; a kvbm that does not know an attachment says so with
    the `Declined` code "unknown", and the worker attaches anew.
    """

    instance: str
    model: str
    layout: KvLayout
    lock: str


class Attached(Struct, frozen=True, array_like=True, tag="attached"):
    """`arena` is the name of a file in the directory, to be mapped; `key` names blocks.

    Up to `keeps` blocks of the prompts of this attachment can be the `base` of others.
    """

    attachment: int
    arena: str
    arena_bytes: int
    key: bytes
    keeps: int = 0


class Incomplete(Struct, frozen=True, array_like=True, tag="incomplete"):
    """The `base` of an `Offer` or a `Fetch` is not known."""


class Declined(Struct, frozen=True, array_like=True, tag="declined"):
    """Not done. `code`: "unknown" (attach again), "layout", "full", "invalid" or "closing"."""

    code: str
    reason: str


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """Full blocks `first` … of a prompt could be written through. Gets `Wanted` or `Incomplete`.

    `digests`, `sequence` and `local` are of the whole prefix up to the last of them; `salt` seeds
    the hashes. `retention` is in tokens of the prompt, later entries win.
    """

    attachment: int
    first: int
    digests: bytes
    sequence_hashes: bytes
    local: bytes
    salt: int
    tenant: str = ""
    session: str | None = None
    retention: list[Retain] = []
    base: bytes = b""
    shared: int = 0


class Wanted(Struct, frozen=True, array_like=True, tag="wanted"):
    """Write these blocks (packed uint32, counted from the root) at these offsets, then `Commit`.

    Ticket 0 comes with no blocks and needs no commit.
    """

    ticket: int
    blocks: bytes
    offsets: bytes


class Commit(Struct, frozen=True, array_like=True, tag="commit"):
    """The first `len(checksums)` wanted blocks are written; the others never will be.

    Ends the ticket; no checksums give it up. Answer: `Done`.
    """

    attachment: int
    ticket: int
    checksums: bytes


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """How many blocks it concerned."""

    blocks: int = 0


class Fetch(Struct, frozen=True, array_like=True, tag="fetch"):
    """A prompt (its full blocks from the root on) starts, `held` leading ones are in the engine.

    Asks for those that follow, if loading them beats computing: `compute_tps` tokens and
    `load_bps` bytes a second are what the engine has measured, 0 if it does not know. The ticket
    waits up to `wait_s` for blocks that another worker computes now, and the answer half a second
    at most; what nobody has counts, from here on, as being computed by this one, if `computes`.
    Answer: `Fetched` or `Incomplete`.
    """

    attachment: int
    request: str
    held: int
    digests: bytes
    sequence_hashes: bytes
    local: bytes
    salt: int
    compute_tps: float
    load_bps: float
    wait_s: float
    computes: bool = True
    tenant: str = ""
    session: str | None = None
    retention: list[Retain] = []
    base: bytes = b""
    shared: int = 0


class Fetched(Struct, frozen=True, array_like=True, tag="fetched"):
    """The next `len(offsets)` blocks are in the arena; `pending` more are on their way there.

    `tiers` says for each of these blocks where it was (packed uint8), `retention` (in tokens of the
    prompt) what they inherit. With `pending`, ask on with `Await`. A checksum that does not match
    is told with `Corrupt`. Ticket 0 comes without blocks and is not given back.
    """

    ticket: int
    offsets: bytes
    checksums: bytes
    tiers: bytes
    pending: int = 0
    retention: list[Retain] = []


class Await(Struct, frozen=True, array_like=True, tag="await"):
    """The next blocks of a ticket. Gets `Fetched` once there are any, or in `wait_s`, or 0.5 s."""

    attachment: int
    ticket: int
    wait_s: float


class Finish(Struct, frozen=True, array_like=True, tag="finish"):
    """The worker is done with a ticket's blocks, whatever came of it. Answer: `Done`."""

    attachment: int
    ticket: int


class Computed(Struct, frozen=True, array_like=True, tag="computed"):
    """`request` computes nothing more: whoever waits for its blocks need not. Answer: `Done`."""

    attachment: int
    request: str


class Corrupt(Struct, frozen=True, array_like=True, tag="corrupt"):
    """Blocks (digests) whose content was not what it should be are dropped. Answer: `Done`."""

    attachment: int
    ticket: int
    digests: bytes


class Detach(Struct, frozen=True, array_like=True, tag="detach"):
    """The worker leaves and uses nothing any more. Answer: `Done`."""

    attachment: int


class Lend(Struct, frozen=True, array_like=True, tag="lend"):
    """The kvbm of another node would read blocks, of `block_bytes` each. Answer: `Lent`."""

    digests: bytes
    block_bytes: int


class Lent(Struct, frozen=True, array_like=True, tag="lent"):
    """The first `len(offsets)` of them may be read from the arena with a grant of `transfer`.

    Without any, `descriptor` is empty.
    """

    descriptor: bytes
    offsets: bytes
    checksums: bytes


class Prepare(Struct, frozen=True, array_like=True, tag="prepare"):
    """The kvbm of another node would have blocks of a prompt that are not in the arena yet.

    Those on disk come up if that beats computing, at the speeds of a `Fetch`; those that a worker
    computes now are waited for. The answer, `Prepared`, comes with the first that are ready, or
    after `wait_s`. With `stored` the other node can read them only in the store that all share.
    """

    model: str
    layout: KvLayout
    digests: bytes
    compute_tps: float
    load_bps: float
    wait_s: float
    stored: bool = False


class Prepared(Struct, frozen=True, array_like=True, tag="prepared"):
    """The first `blocks` may be lent now, or are in the shared store; with `more`, ask again."""

    blocks: int
    more: bool
    stored: bool = False


class Computing(Struct, frozen=True, array_like=True, tag="computing"):
    """Told to the kvbms of all nodes: one of the workers at `instance` computes these blocks.

    `digests` are some of a prompt's, its last one among them. In place of what was told before
    under the same `number`; without any, nothing more comes of it. It counts for `lasts_s`.
    """

    instance: str
    number: int
    digests: bytes
    lasts_s: float


KvbmRequest: TypeAlias = (
    Attach | Offer | Commit | Fetch | Await | Finish | Computed | Corrupt | Detach | Lend | Prepare
)
KvbmReply: TypeAlias = Attached | Wanted | Fetched | Incomplete | Done | Lent | Prepared | Declined
