"""Outcome of a `Clear`: the blocks that are gone, and those that prompts may still find."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.bus.messages import Clear, ControlReply, NotCleared
from kvmesh.index import TIERS

ENGINE, HOST, DISK, REMOTE = range(TIERS)
UNCLEARED_SHARE = "it clears all of its blocks or none, and requests or copies use some"
NO_NAMESPACE = "it cannot clear a single namespace"


@dataclass(frozen=True)
class ClearOutcome:
    """`blocks` are gone. `kept` says by tier why blocks that the command named are still there.

    An engine that does not know the number of blocks counts 0.
    """

    blocks: int = 0
    kept: Mapping[int, str] = field(default_factory=dict)


def named_tiers(command: Clear) -> Container[int]:
    """The tiers that a command names: all if it lists none."""
    return command.tiers or range(TIERS)


def in_use(blocks: int, tier: int = ENGINE) -> dict[int, str]:
    """`ClearOutcome.kept` of an engine whose requests or copies use `blocks` of the named ones."""
    if not blocks:
        return {}
    plural = "" if blocks == 1 else "s"
    return {tier: f"requests or copies use {blocks} block{plural}: clear again once they end"}


def combined(outcomes: Iterable[ClearOutcome]) -> ClearOutcome:
    """The outcome of several ranks or parts of an engine; of several reasons the first."""
    blocks, kept = 0, dict[int, str]()
    for outcome in outcomes:
        blocks += outcome.blocks
        kept = {**outcome.kept, **kept}
    return ClearOutcome(blocks, kept)


def clear_reply(outcome: ClearOutcome) -> ControlReply:
    """The reply to a `Clear`, which is `ok` if no prompt finds the blocks that it named."""
    kept = [NotCleared(tier, reason) for tier, reason in sorted(outcome.kept.items())]
    by_reason: dict[str, list[int]] = {}
    for each in kept:
        by_reason.setdefault(each.reason, []).append(each.tier)
    reasons = (f"{_tiers(tiers)}: {reason}" for reason, tiers in by_reason.items())
    return ControlReply(not kept, "; ".join(reasons), outcome.blocks, not_cleared=kept)


def _tiers(tiers: list[int]) -> str:
    return f"tier{'' if len(tiers) == 1 else 's'} {', '.join(map(str, tiers))}"
