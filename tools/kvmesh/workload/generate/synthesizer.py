"""Synthesizes traces with the prefix sharing of a seed trace.

The prompts of the seed form a prefix tree of blocks. Blocks of several prompts are its *core*; the
unique rest of a prompt is a *leaf*. A synthetic prompt walks from the root of the core by the
seed's transition probabilities (a chain without branches is one step) and ends with a leaf whose
lengths are drawn from the seed's.
"""

import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.model import LIMIT, Round, Session, SomeTokens, Workload
from kvmesh.workload.tree import ROOT, Tree

MIN_POOL = 8
TRIES = 1000
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]


class SynthesisError(WorkloadError):
    """A seed that cannot be used, or options that no prompt satisfies."""


class SynthesisOptions(Struct, frozen=True, kw_only=True):
    """Changes to the seed.

    The multipliers scale shared parts, unique parts and outputs; `prefix_root_multiplier` is the
    number of copies of the core, which share nothing; arrivals are `speedup_ratio` times faster;
    prompts above `max_isl` tokens are rejected.
    """

    num_requests: SomeTokens
    prefix_len_multiplier: Factor = 1.0
    prefix_root_multiplier: Annotated[int, Meta(ge=1)] = 1
    prompt_len_multiplier: Factor = 1.0
    osl_multiplier: Factor = 1.0
    speedup_ratio: Factor = 1.0
    max_isl: SomeTokens = LIMIT
    block_size: SomeTokens = 512
    seed: int = 0


class BranchNode:
    """A chain of core blocks with its children; `leaves` are the prompts that end after it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.children: list[BranchNode] = []
        self.visits = 0
        self.leaves: list[Leaf] = []
        self.weights: list[int] = []


class Leaf(Struct, frozen=True):
    """A seed prompt's unique tokens after the core, and its output tokens."""

    tokens: int
    output: int


class SharedCore:
    """The shared part of a seed's prompts as a tree of chains. Raises SynthesisError."""

    def __init__(self, workload: Workload, block_size: int) -> None:
        paths = [self._path(workload, r, block_size) for r in workload.rounds]
        self._visits, self._parents = _count(paths)
        self.root = BranchNode(0)
        self._nodes: dict[int, BranchNode] = {ROOT: self.root}
        for path, round_ in zip(paths, workload.rounds, strict=True):
            self._add(path, round_, block_size)
        _contract(self.root)
        for node, _ in _walks(self.root):
            node.weights = list(accumulate((child.visits for child in node.children), initial=0))
        self.by_depth = _leaves_by_depth(self.root)

    def _path(self, workload: Workload, round_: Round, block_size: int) -> list[int]:
        blocks: list[int] = workload.tree.blocks(
            round_.branch, round_.input_tokens, block_size
        ).tolist()
        return blocks

    def _add(self, path: list[int], round_: Round, block_size: int) -> None:
        node, depth = self.root, 0
        node.visits += 1
        for block in path:
            if self._visits[block] < 2:
                break
            below = self._nodes.get(block)
            if below is None:
                below = self._nodes[block] = BranchNode(1)
                node.children.append(below)
            node, depth = below, depth + 1
            node.visits += 1
        unique = round_.input_tokens - depth * block_size
        node.leaves.append(Leaf(unique, round_.output_tokens))


def _count(paths: list[list[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """Number of prompts and parent of each block; raises SynthesisError for two parents."""
    visits: dict[int, int] = {}
    parents: dict[int, int] = {}
    for path in paths:
        before = ROOT
        for block in path:
            if parents.setdefault(block, before) != before:
                raise SynthesisError(f"block {block} has two parents: not a prefix tree")
            visits[block] = visits.get(block, 0) + 1
            before = block
    return visits, parents


def _contract(root: BranchNode) -> None:
    """Merge each node with its only child unless prompts end between them."""
    stack = list(root.children)
    while stack:
        node = stack.pop()
        while len(node.children) == 1 and not node.leaves:
            child = node.children[0]
            node.blocks += child.blocks
            node.children, node.leaves = child.children, child.leaves
        stack.extend(node.children)


def _walks(root: BranchNode) -> Iterator[tuple[BranchNode, int]]:
    """Every node with its depth in blocks, its own included."""
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack.extend((child, depth + child.blocks) for child in node.children)


def _leaves_by_depth(root: BranchNode) -> dict[int, list[Leaf]]:
    """Leaves pooled by the power of two of their depth, which correlates with their length."""
    pools: dict[int, list[Leaf]] = {}
    for node, depth in _walks(root):
        pools.setdefault(depth.bit_length(), []).extend(node.leaves)
    return pools


class Synthesizer:
    """Draws requests like those of a seed trace, determined by the options."""

    def __init__(self, workload: Workload, options: SynthesisOptions) -> None:
        if not workload.rounds:
            raise SynthesisError("the seed trace has no requests")
        if any(round_.after for round_ in workload.rounds):
            raise SynthesisError("the seed is closed-loop; generate from a profile instead")
        self._options = options
        self._rng = random.Random(options.seed)
        self._core = SharedCore(workload, options.block_size)
        self._gaps = _gaps(workload)
        self._tree = Tree()
        self._branches: dict[tuple[int, int], tuple[int, int]] = {}

    def workload(self) -> Workload:
        """`num_requests` independent requests in the order of their arrival."""
        options = self._options
        rounds: list[Round] = []
        clock = 0.0
        for index in range(options.num_requests):
            branch, tokens, output = self._prompt()
            rounds.append(
                Round(
                    session=index,
                    branch=branch,
                    output_branch=self._tree.fork(branch, tokens),
                    input_tokens=tokens,
                    output_tokens=output,
                    at_s=clock,
                )
            )
            clock += self._rng.choice(self._gaps) / options.speedup_ratio
        return Workload(
            tree=self._tree,
            sessions=[Session(name=f"r{index}") for index in range(len(rounds))],
            rounds=rounds,
        )

    def _prompt(self) -> tuple[int, int, int]:
        """Branch, prompt tokens and output tokens of one request."""
        options = self._options
        for _ in range(TRIES):
            path, depth = self._walk()
            leaf = self._leaf(path[-1], depth)
            core = round(depth * options.block_size * options.prefix_len_multiplier)
            tokens = core + round(leaf.tokens * options.prompt_len_multiplier)
            if 0 < tokens <= options.max_isl:
                copy = self._rng.randrange(options.prefix_root_multiplier)
                branch = self._tree.fork(self._branch_along(path, copy), core)
                output = max(1, round(leaf.output * options.osl_multiplier))
                return branch, tokens, min(output, LIMIT)
        raise SynthesisError(f"no prompt of at most {options.max_isl} tokens in {TRIES} tries")

    def _walk(self) -> tuple[list[BranchNode], int]:
        """Nodes from the root of the core to the start of a leaf, and their blocks."""
        node, path, depth = self._core.root, [self._core.root], 0
        while True:
            total = node.weights[-1] + len(node.leaves)
            child = bisect(node.weights, self._rng.randrange(total)) - 1
            if child == len(node.children):
                return path, depth
            node = node.children[child]
            path.append(node)
            depth += node.blocks

    def _leaf(self, node: BranchNode, depth: int) -> Leaf:
        """A leaf of this node, or of nodes of similar depth if it has fewer than MIN_POOL."""
        pool = node.leaves
        if len(pool) < MIN_POOL:
            pool = self._core.by_depth[depth.bit_length()]
        return self._rng.choice(pool)

    def _branch_along(self, path: list[BranchNode], copy: int) -> int:
        """The branch along a path in one copy of the core, created on first use."""
        scale = self._options.block_size * self._options.prefix_len_multiplier
        branch, depth = ROOT, 0
        for node in path:
            key = (id(node), copy)
            known = self._branches.get(key)
            if known is None:
                known = (self._tree.fork(branch, round(depth * scale)), depth + node.blocks)
                self._branches[key] = known
            branch, depth = known
        return branch


def _gaps(workload: Workload) -> list[float]:
    """Inter-arrival times of the seed, in seconds."""
    times = sorted(round_.at_s for round_ in workload.rounds if not round_.after)
    return [b - a for a, b in pairwise(times)] or [0.0]
