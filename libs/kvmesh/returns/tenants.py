"""The tenants that use a model: beside others, a tenant's reports may cost these nothing."""

from collections import OrderedDict

from kvmesh.bus.messages import Hints, session_owner

SEEN_S = 900.0  # after its last request, a tenant's blocks have left


class SeenTenants:
    """The two latest tenants of a model's requests, by their fair class and by their sessions."""

    def __init__(self) -> None:
        self._classes: OrderedDict[str, float] = OrderedDict()
        self._owners: OrderedDict[str, float] = OrderedDict()

    def note(self, hints: Hints, now: float) -> None:
        """Note a request at the Unix time `now`."""
        _note(self._classes, hints.tenant or "", now)
        if hints.session:
            _note(self._owners, session_owner(hints.session), now)

    def several(self, now: float) -> bool:
        """True if more than one tenant has sent requests within SEEN_S."""
        since = now - SEEN_S
        for seen in (self._classes, self._owners):
            if len(seen) > 1 and next(iter(seen.values())) > since:
                return True
        return False


def _note(seen: OrderedDict[str, float], name: str, now: float) -> None:
    seen[name] = now
    seen.move_to_end(name)
    if len(seen) > 2:
        seen.popitem(last=False)
