"""Announcement of the blocks that a request computes, on the node and in the mesh."""

from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress, RequestKey
from kvmesh.kvbm.core.transfers.loadable_prefix import block_size
from kvmesh.kvbm.core.transfers.mesh_claims import Claims, PeerClaims, PeerSource
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

MIN_CLAIM_S = 0.1


class ComputeAnnouncer:
    """Announces missing blocks of read tickets. `instance` is this node's id among claimants."""

    def __init__(
        self,
        store: Store,
        in_progress: BlocksInProgress,
        claims: Claims,
        peer_claims: PeerClaims,
        instance: str,
    ) -> None:
        self._store = store
        self._in_progress = in_progress
        self._claims = claims
        self._peer_claims = peer_claims
        self._instance = instance

    def announce(self, ticket: ReadTicket) -> None:
        """Announce the blocks after the ticket's end that no tier has."""
        if ticket.request is None:
            return
        digests = ticket.prompt.digests[ticket.end :]
        missing = [digest for digest in digests if digest not in self._store.blocks]
        self._in_progress.add(ticket.request, missing, self._store.now)
        self._claim(ticket, ticket.request, len(missing))

    def _claim(self, ticket: ReadTicket, request: RequestKey, missing: int) -> None:
        """Claim the blocks in the mesh, unless computing is faster than another node's query."""
        prompt, first = ticket.prompt, ticket.end
        tokens, tps = missing * block_size(prompt), ticket.engine.compute_tps
        if self._store.remote is None or (missing and tps and tokens / tps < MIN_CLAIM_S):
            return
        if ticket.lookup_pending and (peer := self._peer_claims.find(prompt, first)) is not None:
            first = peer.end
        self._claims.start(request, prompt, first if missing else len(prompt), self._store.now)

    def claimant(self, ticket: ReadTicket) -> PeerSource | None:
        """The node that computes the next blocks; None if this request's claim has precedence."""
        peer = self._peer_claims.find(ticket.prompt, ticket.end)
        own = self._claims.first(ticket.request)
        if peer is None or (
            own is not None and own <= ticket.end and self._instance < peer.instance
        ):
            return None
        return peer

    def drop_peer_claims(self, instance: str, ticket: ReadTicket) -> None:
        """Forget a node's claims of the rest of a ticket's prompt."""
        self._peer_claims.drop(instance, ticket.prompt, ticket.end)
