"""Trees of prompts, one letter a block, for tests of the dashboard."""

from kvmesh.bus.messages import Candidate, Decision, Hints
from kvmesh.dashboard.state.prefixes.tree import PromptTree, prompt_tree
from kvmesh.dashboard.state.requests.log import RequestLog

BLOCK = 16
CHOSEN = Candidate(
    instance="w-0-1", worker="w-0", rank=0, overlap=[], prefill=0, decode=0, requests=0, cost=0
)


def chained(text: str) -> bytes:
    """A hash for each letter, of all letters up to it."""
    return b"".join(
        hash(text[:end]).to_bytes(8, "little", signed=True) for end in range(1, len(text) + 1)
    )


def tree_of(*prompts: tuple[str, str], model: str = "m") -> PromptTree:
    """The tree of prompts, one letter a block, of sessions; the latest comes last."""
    log = RequestLog(1e9, 1 << 30)
    for number, (session, text) in enumerate(prompts):
        decision = Decision(
            request=f"r{number}",
            model="m",
            time=float(number),
            router="",
            policy="",
            chosen=CHOSEN,
            candidates=[],
            tokens=len(text) * BLOCK,
            sequence_hashes=chained(text),
            max_tokens=1,
            block_size=BLOCK,
            hints=Hints(session=session or None),
        )
        log.add_route(decision, float(number))
    return prompt_tree(log.latest(), model)
