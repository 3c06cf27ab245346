"""Figures of the tiers below the engines: cached tokens by tier, and bytes over each link."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvmesh.simulator.mesh import Simulation

GIB = 1 << 30
TIERS = ("engine", "host memory", "disk", "remote")
LINKS = (
    ("engines to hosts", "from_engines"),
    ("hosts to engines", "to_engines"),
    ("written to disk", "disk_written"),
    ("written to disk again", "disk_rewritten"),
    ("read from disk", "disk_read"),
    ("between nodes", "network"),
    ("to the remote store", "store_written"),
    ("from the remote store", "store_read"),
)


class TierFigures(Struct, frozen=True, kw_only=True):
    """`tokens` are the cached prompt tokens of finished requests by tier, `shares` those over all
    prompt tokens.

    The others are totals of all nodes. `moved` are bytes by link; "disk_rewritten" are those of
    "disk_written" in blocks that the same disk had held before. A *load* brought blocks to an
    engine or made it wait. `skipped_blocks` left an engine before they were written through.
    """

    tokens: list[int]
    shares: list[float]
    moved: dict[str, int]
    loads: int = 0
    skipped_blocks: int = 0


Row = tuple[str, Callable[[TierFigures], str]]


def tier_figures(
    simulation: Simulation, done: NDArray[np.bool_], prompt_tokens: int
) -> TierFigures:
    """The figures of a finished simulation; `done` selects its finished requests."""
    tokens = [0] * len(TIERS)
    for number in np.flatnonzero(done):
        for tier, count in enumerate(simulation.records.tiers[number]):
            tokens[tier] += count
    nodes = simulation.nodes.nodes if simulation.nodes is not None else []
    totals = [node.totals for node in nodes]
    return TierFigures(
        tokens=tokens,
        shares=[count / max(prompt_tokens, 1) for count in tokens],
        moved={name: sum(getattr(t, name) for t in totals) for _, name in LINKS} if nodes else {},
        loads=sum(t.loads for t in totals),
        skipped_blocks=sum(t.skipped_blocks for t in totals),
    )


def _share(tier: int, figures: TierFigures) -> str:
    return f"{figures.shares[tier]:.1%}"


def _moved(link: str, figures: TierFigures) -> str:
    return f"{figures.moved[link] / GIB:,.1f}" if link in figures.moved else "–"


def tier_rows(runs: Sequence[TierFigures]) -> list[Row]:
    """Rows for the tiers and links that any of these runs has used."""
    rows: list[Row] = []
    used = [tier for tier in range(len(TIERS)) if any(run.tokens[tier] for run in runs)]
    if any(used):
        rows += [(f"· from {TIERS[tier]}", partial(_share, tier)) for tier in used]
    if not any(run.moved for run in runs):
        return rows
    rows += [
        (f"GiB {name}", partial(_moved, link))
        for name, link in LINKS
        if any(run.moved.get(link) for run in runs)
    ]
    return [*rows, ("loads", lambda f: f"{f.loads:,}")]
