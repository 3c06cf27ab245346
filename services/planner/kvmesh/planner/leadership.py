"""The choice of the planner that decides, among all that run; no I/O."""

from math import inf

from kvmesh.bus.messages import Instance


def seniority(card: Instance) -> tuple[float, str]:
    """The order of planners: the first one leads."""
    return card.started, card.instance


class Leadership:
    """The planners' cards; the one with the oldest lease leads. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._planners: dict[str, Instance] = {}
        self._not_before = -inf

    def joined(self, card: Instance) -> None:
        """A planner has joined, or its card has changed."""
        self._planners[card.instance] = card

    def left(self, instance: str) -> None:
        """A planner has left; other instances are ignored."""
        self._planners.pop(instance, None)

    def lapsed(self, now: float, lease_s: float) -> None:
        """This planner's lease had ended: another one decides.

        A process that was frozen may have dropped the cards of others; all are known again after
        one lease.
        """
        self._not_before = now + lease_s

    def leads(self, own: Instance, now: float) -> bool:
        """True if no other planner has an older lease than the card `own`."""
        return now >= self._not_before and all(
            seniority(own) <= seniority(card) for card in self._planners.values()
        )
