"""Serving side of peer reads: lends blocks of this node's arena to other kvbms."""

from array import array
from collections.abc import Callable

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.messages import Lend, Lent, Prepare, Prepared
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.kvbm.peers.reader import NoPeerReader, PeerReader

EMPTY = Lent(b"", b"", b"")


class Lender:
    """Lends blocks of `manager` for `lend_s` seconds, or until they were read.

    Peers can read only after `reader` has registered the arena for transfers.
    """

    def __init__(
        self,
        manager: Manager,
        reader: PeerReader | NoPeerReader,
        lend_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._lend_s = lend_s
        self._clock = clock

    def answer(self, request: Lend | Prepare) -> Lent | Prepared | ParkedFetch:
        if isinstance(request, Lend):
            return self._lend(request)
        if request.stored or self._reader.region is not None:
            return self._manager.prepare(request, self._clock())
        return Prepared(0, more=self._reader.opening)

    def _lend(self, request: Lend) -> Lent:
        region = self._reader.region
        if region is None:
            return EMPTY
        digests = split_digests(request.digests)
        lent = self._manager.lending.lend(digests, request.block_bytes, self._clock())
        if not lent:
            return EMPTY
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
