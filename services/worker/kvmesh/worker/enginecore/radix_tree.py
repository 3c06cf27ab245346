"""Full blocks as a compressed radix tree over their sequence hashes.

A sequence hash identifies a block and all blocks before it, so the last hash of a run identifies
the whole run. The cost of a prefix grows with the number of branches on it, not with its length.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator

from kvmesh.retention.claims import BlockRetention


class BlockRun:
    """Consecutive blocks with the same users: each of `refs` sequences uses all of them.

    `hashes` and `local_hashes` have one entry per block. `children` continue after the last block,
    by the first hash of each. `salt` and `tenant` are meaningful only without a `parent`.
    `retention` is None if nothing is requested for the run; unused blocks are `doubtful` if the
    session that used them may have left them; `lapsed` is EXPIRED or CLIPPED if the
    retention requested at its last use has expired or was refused.
    """

    __slots__ = (
        "children",
        "doubtful",
        "hashes",
        "lapsed",
        "local_hashes",
        "parent",
        "refs",
        "retention",
        "salt",
        "tenant",
    )

    def __init__(
        self,
        hashes: "array[int]",
        local: "array[int]",
        parent: "BlockRun | None",
        salt: int,
        tenant: str = "",
    ) -> None:
        self.hashes = hashes
        self.local_hashes = local
        self.parent = parent
        self.salt = salt
        self.tenant = tenant
        self.refs = 0
        self.retention: BlockRetention | None = None
        self.doubtful = False
        self.lapsed: str | None = None
        self.children: dict[int, BlockRun] = {}

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.hashes)


class PrefixMatch:
    """The runs that contain `matched` leading blocks of a prefix.

    `unmatched` trailing blocks of the last run are not part of the prefix.
    """

    __slots__ = ("matched", "runs", "unmatched")

    def __init__(self, runs: list[BlockRun], held: int, over: int) -> None:
        self.runs = runs
        self.matched = held
        self.unmatched = over

    @property
    def inactive(self) -> int:
        """Number of matched blocks without users."""
        inactive = sum([len(run.hashes) for run in self.runs if not run.refs])
        return inactive - self.unmatched if self.unmatched and not self.runs[-1].refs else inactive


class RadixTree:
    """The runs of all full blocks; each block is in one run."""

    def __init__(self) -> None:
        self.roots: dict[int, BlockRun] = {}
        self._by_end: dict[int, BlockRun] = {}

    def __iter__(self) -> Iterator[BlockRun]:
        """All runs, parents first."""
        waiting = list(self.roots.values())
        while waiting:
            run = waiting.pop()
            yield run
            waiting.extend(run.children.values())

    def run_ending_at(self, block: int | None) -> BlockRun | None:
        """The run whose last block is `block`, None for None.

        Raises KeyError if no run ends there.
        """
        return None if block is None else self._by_end[block]

    def children_of(self, run: BlockRun | None) -> dict[int, BlockRun]:
        """The runs after a run, or the roots for None, by first block."""
        return self.roots if run is None else run.children

    def match(self, hashes: "array[int]", start: BlockRun | None = None) -> PrefixMatch:
        """Follow `hashes` from the end of `start` as far as blocks are held."""
        runs: list[BlockRun] = []
        at, end = 0, len(hashes)
        children = self.roots if start is None else start.children
        while at < end:
            run = children.get(hashes[at])
            if run is None:
                break
            runs.append(run)
            length = len(run.hashes)
            if at + length > end or hashes[at + length - 1] != run.hashes[-1]:
                common = _common(run.hashes, hashes, at)
                return PrefixMatch(runs, at + common, length - common)
            at += length
            children = run.children
        return PrefixMatch(runs, at, 0)

    def add_run(
        self,
        parent: BlockRun | None,
        hashes: "array[int]",
        local: "array[int]",
        salt: int,
        tenant: str,
    ) -> BlockRun:
        """Add a run after `parent`."""
        run = self.children_of(parent)[hashes[0]] = BlockRun(hashes, local, parent, salt, tenant)
        self._by_end[hashes[-1]] = run
        return run

    def extend(self, run: BlockRun, hashes: "array[int]", local: "array[int]") -> None:
        """Append blocks to a run without children."""
        del self._by_end[run.hashes[-1]]
        run.hashes += hashes
        run.local_hashes += local
        self._by_end[hashes[-1]] = run

    def split(self, run: BlockRun, at: int) -> BlockRun:
        """Split off the first `at` blocks of `run` as a separate run and return it."""
        upper = self.add_run(
            run.parent, run.hashes[:at], run.local_hashes[:at], run.salt, run.tenant
        )
        upper.refs = run.refs
        upper.retention = run.retention.copy() if run.retention is not None else None
        upper.doubtful, upper.lapsed = run.doubtful, run.lapsed
        del run.hashes[:at]
        del run.local_hashes[:at]
        run.parent = upper
        upper.children[run.hashes[0]] = run
        return upper

    def truncate(self, run: BlockRun, count: int) -> "array[int]":
        """Drop the last `count` blocks of a run without children; return them, last one first."""
        del self._by_end[run.hashes[-1]]
        left = len(run.hashes) - count
        gone = run.hashes[left:]
        del run.hashes[left:]
        del run.local_hashes[left:]
        if left:
            self._by_end[run.hashes[-1]] = run
        else:
            del self.children_of(run.parent)[gone[0]]
        gone.reverse()
        return gone


def _common(run: "array[int]", hashes: "array[int]", at: int) -> int:
    """Number of leading blocks of `run` that equal `hashes` from index `at` on."""
    length = min(len(run), len(hashes) - at)
    return bisect_left(range(length), True, key=lambda index: run[index] != hashes[at + index])
