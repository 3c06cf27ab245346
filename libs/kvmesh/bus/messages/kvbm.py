"""Messages between the workers of a node and its kvbm, and between the kvbms of nodes.

Messages carry no block bytes: a worker copies between its engine and the arena, which it maps. All
are arrays, which grow at the end only. Digests are packed, 16 bytes each; hashes, offsets and
checksums are packed little-endian uint64, one per block. A request goes to
`Subjects.kvbm(instance)`; the reply is the one named in its docstring, or `Declined`.

A *ticket* represents blocks that a worker uses: until the worker returns it, they are neither
evicted nor overwritten. An attached worker holds an exclusive `flock` on its own file in the node's
directory; when that lock is free, the kvbm reclaims the worker's tickets.

`Offer` and `Fetch` describe a whole prompt, as a delta where possible (`kvmesh.prompt_delta`): with
`base`, the last digest of an earlier prompt of the same attachment, the blocks are the first
`shared` blocks of that prompt followed by those in the message. If the kvbm has evicted the base,
it replies `Incomplete` and does nothing else; the worker then sends the whole prompt. `first` and
`held` always count from the root of the prompt.

`traceparent` is that of a traced request (W3C), empty for others.
"""

from typing import TypeAlias

from msgspec import Struct

from kvmesh.bus.messages.layout import KvLayout
from kvmesh.bus.messages.work import Retain


class Attach(Struct, frozen=True, array_like=True, tag="attach"):
    """Attach a worker that holds the lock file `lock` in the node's directory. Reply: `Attached`.

    Sent again after a restart of either side: a kvbm declines an unknown attachment with the code
    "unknown", and the worker attaches again.
    """

    instance: str
    model: str
    layout: KvLayout
    lock: str


class Attached(Struct, frozen=True, array_like=True, tag="attached"):
    """`arena` is the name of the file in the directory to map; `key` is the key of block digests.

    The kvbm stores up to `prompt_blocks` blocks of this attachment's prompts as bases of deltas.
    """

    attachment: int
    arena: str
    arena_bytes: int
    key: bytes
    prompt_blocks: int = 0


class Incomplete(Struct, frozen=True, array_like=True, tag="incomplete"):
    """The kvbm does not have the `base` of an `Offer` or `Fetch`."""


class Declined(Struct, frozen=True, array_like=True, tag="declined"):
    """Request refused. `code`: "unknown" (attach again), "layout", "full", "invalid", "closing"."""

    code: str
    reason: str


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """Offer full blocks of a prompt, from index `first` on. Reply: `Wanted` or `Incomplete`.

    `digests`, `sequence_hashes` and `local` are those of the whole prefix up to the last block;
    `salt` seeds the hashes. `retention` is in tokens of the prompt; later entries win. `request` is
    the one that computed the blocks. `conversation` is as in `Hints`; a `tentative` prompt says
    nothing about earlier ones of its session.
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
    traceparent: str = ""
    request: str = ""
    conversation: int = 0
    tentative: bool = False


class Wanted(Struct, frozen=True, array_like=True, tag="wanted"):
    """Write these blocks (packed uint32 indices from the root) at these offsets, then `Commit`.

    Ticket 0 has no blocks and needs no commit.
    """

    ticket: int
    blocks: bytes
    offsets: bytes


class Commit(Struct, frozen=True, array_like=True, tag="commit"):
    """End a ticket: the first `len(checksums)` wanted blocks are written, the others will not be.

    Without checksums the write is abandoned. Reply: `Done`.
    """

    attachment: int
    ticket: int
    checksums: bytes


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """Success; `blocks` counts the blocks concerned."""

    blocks: int = 0


class Fetch(Struct, frozen=True, array_like=True, tag="fetch"):
    """Request the blocks of a starting prompt after the `held` leading ones in the engine.

    The message describes all full blocks from the root. The kvbm returns blocks if loading them
    beats computing, by the engine's measured `compute_tps` tokens and `load_bps` bytes per second,
    0 if unknown. The ticket waits up to `wait_s` for blocks that another worker is computing, the
    reply at most half a second. With `computes`, this worker is recorded as computing the blocks
    that are missing everywhere. With `overlaps`, the worker loads while it computes, from the last
    block on, and decides itself what to load of the arena. `conversation` and `tentative` are as in
    `Offer`. Reply: `Fetched` or `Incomplete`.
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
    traceparent: str = ""
    overlaps: bool = False
    conversation: int = 0
    tentative: bool = False


class Fetched(Struct, frozen=True, array_like=True, tag="fetched"):
    """The next `len(offsets)` blocks are in the arena; `pending` more are being loaded into it.

    `tiers` are the tiers that the blocks came from (packed uint8); `retention`, in tokens of the
    prompt, is the retention that they inherit. With `pending`, the worker continues with `Await`.
    It reports a wrong checksum with `Corrupt`. Ticket 0 has no blocks and is not returned.
    """

    ticket: int
    offsets: bytes
    checksums: bytes
    tiers: bytes
    pending: int = 0
    retention: list[Retain] = []


class Await(Struct, frozen=True, array_like=True, tag="await"):
    """Request the next blocks of a ticket. Reply: `Fetched`, within `wait_s` and 0.5 s at most."""

    attachment: int
    ticket: int
    wait_s: float


class Finish(Struct, frozen=True, array_like=True, tag="finish"):
    """Return a ticket: the worker no longer uses its blocks. Reply: `Done`."""

    attachment: int
    ticket: int


class Computed(Struct, frozen=True, array_like=True, tag="computed"):
    """`request` computes no more blocks, so no fetch needs to wait for it. Reply: `Done`."""

    attachment: int
    request: str


class Corrupt(Struct, frozen=True, array_like=True, tag="corrupt"):
    """Report blocks (digests) with wrong content, to be dropped. Reply: `Done`."""

    attachment: int
    ticket: int
    digests: bytes


class Detach(Struct, frozen=True, array_like=True, tag="detach"):
    """The worker leaves and no longer uses any blocks. Reply: `Done`."""

    attachment: int


class Lend(Struct, frozen=True, array_like=True, tag="lend"):
    """Request from another node's kvbm to read blocks of `block_bytes` each. Reply: `Lent`."""

    digests: bytes
    block_bytes: int
    traceparent: str = ""


class Lent(Struct, frozen=True, array_like=True, tag="lent"):
    """The first `len(offsets)` blocks may be read from the arena with a grant of `transfer`.

    `descriptor` describes the grant; it is empty without blocks.
    """

    descriptor: bytes
    offsets: bytes
    checksums: bytes


class Prepare(Struct, frozen=True, array_like=True, tag="prepare"):
    """Request from another node's kvbm for blocks of a prompt that are not in the arena yet.

    Blocks on disk are loaded if that beats computing, at the speeds of a `Fetch`; blocks that a
    worker is computing are awaited. The reply, `Prepared`, comes with the first blocks that are
    ready, or after `wait_s`. `stored`: the other node can read blocks only from the remote store.
    """

    model: str
    layout: KvLayout
    digests: bytes
    compute_tps: float
    load_bps: float
    wait_s: float
    stored: bool = False
    traceparent: str = ""


class Prepared(Struct, frozen=True, array_like=True, tag="prepared"):
    """The first `blocks` can be lent now, or are in the remote store; `more`: request again."""

    blocks: int
    more: bool
    stored: bool = False


class ClaimAnnouncement(Struct, frozen=True, array_like=True, tag="computing"):
    """Announcement to the kvbms of all nodes: a worker of kvbm `instance` computes these blocks.

    `digests` are some of the prompt's, including the last. A claim replaces the earlier one with
    the same `number`; without digests it withdraws that. It is valid for `ttl_s` seconds.
    """

    instance: str
    number: int
    digests: bytes
    ttl_s: float


KvbmRequest: TypeAlias = (
    Attach | Offer | Commit | Fetch | Await | Finish | Computed | Corrupt | Detach | Lend | Prepare
)
KvbmReply: TypeAlias = Attached | Wanted | Fetched | Incomplete | Done | Lent | Prepared | Declined
