"""The runs of a prompt tree as pages show them: texts, nodes of the tree, slices. Pure."""

import time
from collections.abc import Mapping
from typing import Any

from kvmesh.dashboard.state.prefixes.holders import UNKNOWN, PrefixHolder, RunHolders
from kvmesh.dashboard.state.prefixes.tree import PrefixRun, PromptTree
from kvmesh.observer.columns import RowColumn, RowView, count_text, share_text
from kvmesh.runtime.logs import printable

MOST_NAME = 60
SHORT_TIERS = ("engine", "host", "disk", "remote")


def short_name(session: str) -> str:
    """The name of a session, cut to MOST_NAME characters."""
    name = printable(session)
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…"


def run_name(tree: PromptTree, run: PrefixRun) -> str:
    """The session of a run if it is the only one, else their number."""
    if run.merged:
        return f"{run.merged} smaller branches"
    if len(run.prompts) > 1:
        return f"{len(run.prompts)} sessions"
    session = tree.prompts[run.prompts[0]].session
    return short_name(session) if session else "one request without session"


def run_state(run: PrefixRun, held: RunHolders) -> str:
    """`held`, `partly`, `lost` if nobody holds the run, else `unknown`."""
    share = held.held
    if share is None or run.merged:
        return "unknown"
    return "held" if share >= 1 else "partly" if share else "lost"


def holders_text(run: PrefixRun, held: RunHolders) -> str:
    """The number of holders by tier, and the share of the best if nobody has all of the run."""
    share = held.held
    if run.merged:
        return ""
    if share is None:
        return "unknown"
    if not share:
        return "held by nobody"
    tiers = zip(SHORT_TIERS, held.by_tier, strict=True)
    text = ", ".join(f"{tier} {count:,}" for tier, count in tiers if count)
    return text if share >= 1 else f"{text}, {int(100 * share)}%"


def nodes(tree: PromptTree, held: Mapping[str, RunHolders]) -> list[dict[str, Any]]:
    """The nodes of Quasar's tree."""
    return [_node(tree, run, held) for run in tree.roots]


def _node(tree: PromptTree, run: PrefixRun, held: Mapping[str, RunHolders]) -> dict[str, Any]:
    of = held.get(run.key, UNKNOWN)
    share = tree.share(run)
    return {
        "id": run.key,
        "label": run_name(tree, run),
        "tenant": tenant_of(tree, run),
        "tokens": f"{run.blocks * tree.block_size:,}",
        "requests": f"{run.requests:,}",
        "share": f"{share:.1%}",
        "width": f"{100 * share:.1f}%",
        "state": run_state(run, of),
        "holders": holders_text(run, of),
        "used": time.strftime("%H:%M:%S", time.localtime(run.last_used)) if run.last_used else "",
        "children": [_node(tree, child, held) for child in run.children],
    }


def tenant_of(tree: PromptTree, run: PrefixRun) -> str:
    """The tenant of a run; tenants share no prefixes, except that merged runs may be of several."""
    names = sorted({printable(tree.prompts[number].tenant) for number in run.prompts} - {""})
    return names[0] if len(names) == 1 else f"{len(names)} tenants" if names else ""


class HolderRow:
    """One rank or block manager that holds some of a run, as tables show it; tiers in tokens."""

    def __init__(self, holder: PrefixHolder, of: int, block_size: int) -> None:
        self.holder = f"{holder.instance}#{holder.rank}"
        self.engine = holder.engine * block_size
        self.host = holder.host * block_size
        self.disk = holder.disk * block_size
        self.remote = holder.remote * block_size
        self.share = holder.blocks / of if of else 0.0


def holder_rows(held: RunHolders, block_size: int) -> list[HolderRow]:
    """The holders of a run."""
    return [HolderRow(holder, held.of, block_size) for holder in held.rows()]


HOLDERS = RowView(
    "holders",
    (
        RowColumn("holder", "rank", number=False),
        RowColumn("share", "of it", share_text),
        *(RowColumn(tier, tier, count_text) for tier in SHORT_TIERS),
    ),
    "share",
    True,
)


def slices(tree: PromptTree, held: Mapping[str, RunHolders], colours: Mapping[str, str]) -> Any:
    """The data of a sunburst: the angle of a run is its prompt tokens, its colour its state."""
    return [_slice(tree, run, held, colours) for run in tree.roots]


def _slice(
    tree: PromptTree, run: PrefixRun, held: Mapping[str, RunHolders], colours: Mapping[str, str]
) -> dict[str, Any]:
    of = held.get(run.key, UNKNOWN)
    text = f"{run_name(tree, run)}: {run.blocks * tree.block_size:,} tokens"
    holders = holders_text(run, of)
    return {
        "name": f"{text}, {holders}" if holders else text,
        "label": {"formatter": run_name(tree, run)},
        "key": run.key,
        "value": run.weight * tree.block_size,
        "itemStyle": {"color": colours[run_state(run, of)]},
        "children": [_slice(tree, child, held, colours) for child in run.children],
    }
