"""The prefixes that the latest prompts of a model share, as a compressed radix tree. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree, common_prefix

MOST_PROMPTS = 200
MOST_REQUESTS = 4000  # whose prompts are compared with those of the tree
MOST_ROOTS, MOST_CHILDREN = 50, 20  # the smaller ones are merged


class RecentPrompt(NamedTuple):
    """The latest prompt of a session; that of a request without session is its own."""

    hashes: bytes
    tokens: int
    session: str
    tenant: str
    request: str
    time: float


@dataclass(slots=True)
class PrefixRun:
    """`blocks` blocks after the first `first` ones of the prompts that pass through.

    `prompts` are their numbers, the latest first; `requests` also counts the earlier prompts of
    their sessions, and `passed` the blocks of the run in all of these. `merged` counts the siblings
    that a run stands for; its blocks are then those of all of them.
    """

    key: str
    first: int
    blocks: int
    prompts: list[int]
    requests: int
    passed: int
    last_used: float
    children: "list[PrefixRun]" = field(default_factory=list)
    merged: int = 0

    @property
    def end(self) -> int:
        return self.first + self.blocks

    @property
    def weight(self) -> int:
        """Blocks passed in this run and those after it."""
        return self.passed + sum(child.weight for child in self.children)

    def runs(self) -> "Iterator[PrefixRun]":
        """This run and those after it, parents first."""
        yield self
        for child in self.children:
            yield from child.runs()


@dataclass(frozen=True)
class PromptTree:
    """The runs with which prompts begin. `tokens` are those of all prompts of `requests` requests.

    `sessions` counts sessions, of which the latest MOST_PROMPTS are in the tree.
    """

    model: str
    block_size: int
    prompts: list[RecentPrompt]
    roots: list[PrefixRun]
    requests: int
    tokens: int
    sessions: int

    def runs(self) -> Iterator[PrefixRun]:
        """All runs, parents first."""
        for root in self.roots:
            yield from root.runs()

    def prompts_of(self, run: PrefixRun) -> list[RecentPrompt]:
        """The prompts that pass through a run, the latest first."""
        return [self.prompts[number] for number in run.prompts]

    def share(self, run: PrefixRun) -> float:
        """The share of all prompt tokens that are in this run."""
        return run.passed * self.block_size / self.tokens if self.tokens else 0.0

    def shared_tokens(self) -> int:
        """Prompt tokens in runs of several sessions."""
        runs = (run for run in self.runs() if len(run.prompts) > 1 and not run.merged)
        return self.block_size * sum(run.passed for run in runs)


class _Passes:
    """Requests that pass through a run, the blocks of it that they have, and the latest of them."""

    __slots__ = ("blocks", "last", "requests")

    def __init__(self) -> None:
        self.requests = self.blocks = 0
        self.last = 0.0


def prompt_tree(requests: Iterable[SeenRequest], model: str) -> PromptTree:
    """The tree of a model's prompts; `requests` come with the latest first."""
    prompts: list[RecentPrompt] = []
    seen: dict[tuple[str, str], bool] = {}
    passing: list[RecentPrompt] = []
    block_size = 0
    for request in requests:
        decision = request.decision
        if decision is None or request.model != model or not decision.block_size:
            continue
        block_size = block_size or decision.block_size
        if decision.block_size != block_size:
            continue  # of earlier workers, whose blocks are others
        prompt = _prompt(request)
        key = (prompt.tenant, prompt.session) if prompt.session else ("", request.request)
        if key not in seen:
            seen[key] = len(prompts) < MOST_PROMPTS
            if seen[key]:
                prompts.append(prompt)
        if seen[key]:
            passing.append(prompt)
        if len(passing) == MOST_REQUESTS:
            break
    tree = PrefixTree()
    for number, prompt in enumerate(prompts):
        tree.add(number, prompt.hashes)
    passes: dict[int, _Passes] = {}
    for prompt in passing:
        _pass(tree, prompt, passes)
    roots = [_run(node, 0, prompts, passes) for node in tree.root.children.values()]
    return PromptTree(
        model,
        block_size,
        prompts,
        _merged(roots, "", MOST_ROOTS),
        len(passing),
        sum(prompt.tokens for prompt in passing),
        len(seen),
    )


def _prompt(request: SeenRequest) -> RecentPrompt:
    decision = request.decision
    tokens = decision.tokens if decision is not None else 0
    return RecentPrompt(
        request.hashes, tokens, request.session, request.tenant, request.request, request.arrived
    )


def _pass(tree: PrefixTree, prompt: RecentPrompt, passes: dict[int, _Passes]) -> None:
    """Count a prompt in the runs of the tree that it begins with."""
    node, at, hashes = tree.root, 0, prompt.hashes
    while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None:
        length = len(child.label)
        if not hashes.startswith(child.label, at):
            length = common_prefix(child.label, hashes, at)
        count = passes.setdefault(id(child), _Passes())
        count.requests += 1
        count.blocks += length // HASH_BYTES
        count.last = max(count.last, prompt.time)
        if length < len(child.label):
            return
        node, at = child, at + length


def _run(
    node: PrefixNode, first: int, prompts: list[RecentPrompt], passes: dict[int, _Passes]
) -> PrefixRun:
    count = passes.get(id(node)) or _Passes()
    return PrefixRun(
        key=node.label[:HASH_BYTES].hex(),
        first=first,
        blocks=node.depth - first,
        prompts=sorted(node.ranks),
        requests=count.requests,
        passed=count.blocks,
        last_used=count.last,
        children=[_run(child, node.depth, prompts, passes) for child in node.children.values()],
    )


def _merged(runs: list[PrefixRun], parent: str, most: int) -> list[PrefixRun]:
    """The heaviest runs, and one for the others if there are several."""
    weights = {run.key: run.weight for run in runs}
    runs = sorted(runs, key=lambda run: weights[run.key], reverse=True)
    kept, others = runs[:most], runs[most:]
    if len(others) < 2:
        kept, others = runs, []
    for run in kept:
        run.children = _merged(run.children, run.key, MOST_CHILDREN)
    if not others:
        return kept
    inside = [run for other in others for run in other.runs()]
    rest = PrefixRun(
        key=f"{parent}+",
        first=others[0].first,
        blocks=sum(run.blocks for run in inside),
        prompts=sorted(number for run in others for number in run.prompts),
        requests=sum(run.requests for run in others),
        passed=sum(run.passed for run in inside),
        last_used=max(run.last_used for run in others),
        merged=len(others),
    )
    return [*kept, rest]
