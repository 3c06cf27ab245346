"""The other side of reading from peers: blocks of this node's arena, lent to another kvbm."""

from array import array
from collections.abc import Callable

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.messages import Lend, Lent, Prepare, Prepared
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.kvbm.peers.reader import PeerReader

NOTHING = Lent(b"", b"", b"")


class Lender:
    """Lends what `manager` has for `lend_s` seconds, or until it has been read.

    Without `peers` nobody can read it here.
    """

    def __init__(
        self,
        manager: Manager,
        peers: PeerReader | None,
        lend_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._peers = peers
        self._lend_s = lend_s
        self._clock = clock

    def answer(self, request: Lend | Prepare) -> Lent | Prepared | ParkedFetch:
        if isinstance(request, Lend):
            return self._lend(request)
        peers = self._peers
        if request.stored or (peers is not None and peers.region is not None):
            return self._manager.prepare(request, self._clock())
        return Prepared(0, more=peers is not None and peers.opening)

    def _lend(self, request: Lend) -> Lent:
        """What there is of it."""
        region = self._peers.region if self._peers is not None else None
        if region is None:
            return NOTHING
        digests = split_digests(request.digests)
        lent = self._manager.lending.lend(digests, request.block_bytes, self._clock())
        if not lent:
            return NOTHING
        grant = region.grant(
            [(copy.offset, request.block_bytes) for copy in lent],
            self._lend_s,
            lambda _: self._manager.lending.take_back(lent, self._clock()),
        )
        return Lent(
            grant.descriptor,
            array("Q", (copy.offset for copy in lent)).tobytes(),
            array("Q", (copy.checksum for copy in lent)).tobytes(),
        )
