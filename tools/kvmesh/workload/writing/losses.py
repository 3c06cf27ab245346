"""Properties of a workload that a written format does not hold, or that its reader ignores."""

from collections.abc import Callable, Collection, Iterator
from typing import Literal, TypeAlias

from kvmesh.workload.model import HUMAN, PAUSE, TOOL, Workload

Property: TypeAlias = Literal[
    "priorities", "classes", "aborts", "parents", "thinking", "kinds", "ends", "waits", "marks",
    "expected", "calls",
]  # fmt: skip
LOSSES: dict[Property, tuple[str, Callable[[Workload], bool]]] = {
    "priorities": ("priorities", lambda w: any(r.priority for r in w.rounds)),
    "classes": ("classes of fairness", lambda w: any(r.fair_class for r in w.rounds)),
    "aborts": ("client aborts", lambda w: any(r.abort_after is not None for r in w.rounds)),
    "parents": (
        "parents of child sessions",
        lambda w: any(s.parent is not None for s in w.sessions),
    ),
    "thinking": ("thinking tokens", lambda w: any(r.thinking_tokens for r in w.rounds)),
    "kinds": ("session kinds", lambda w: any(s.kind for s in w.sessions)),
    "ends": ("session ends", lambda w: any(s.ends for s in w.sessions)),
    "waits": (
        "names of tools and human waits",
        lambda w: any(r.wait not in ("", TOOL, HUMAN, PAUSE) for r in w.rounds),
    ),
    "marks": ("cache marks", lambda w: any(r.marks for r in w.rounds)),
    "expected": ("expected output lengths", lambda w: any(r.osl for r in w.rounds)),
    "calls": (
        "classes of tool calls and approvals",
        lambda w: any(r.wait_class or r.approval_s for r in w.rounds),
    ),
}


def lost(workload: Workload, held: Collection[Property] = ()) -> Iterator[str]:
    """The properties that a workload has and a format that holds only `held` loses."""
    for name, (text, has) in LOSSES.items():
        if name not in held and has(workload):
            yield text
