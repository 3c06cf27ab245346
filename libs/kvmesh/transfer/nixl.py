"""Reading another process's memory through NIXL: RDMA, or on one machine a copy by the kernel.

What lies on one machine is copied while a transfer is posted, with Python's lock held; so reads are
posted in batches, and everybody else has a turn in between.
"""

import asyncio
import importlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvmesh.transfer.channel import TransferReply
from kvmesh.transfer.errors import TransferError
from kvmesh.transfer.grants import Region
from kvmesh.transfer.memory_ranges import Piece, batches

log = logging.getLogger(__name__)
BACKEND = "UCX"
MEMORY = "DRAM"
BATCH_BYTES = 16 << 20
BATCH_PIECES = 4096
POLL_S = 0.0005
SETTLE_S = 5.0
MOST_KNOWN = 256  # other processes: of workers nobody tells when they are gone


class _Known(NamedTuple):
    """The address of another process, and the metadata of those of its regions that were read."""

    peer: str
    metadata: set[bytes]


class NixlAgent:
    """This process to NIXL."""

    def __init__(self) -> None:
        """Raises TransferError if NIXL is not installed or does not start."""
        self.name = secrets.token_hex(8)
        try:
            self._agent = _make(self.name)
        except Exception as error:  # NIXL's errors have no base of their own
            raise TransferError("unavailable", "", f"NIXL does not start: {error}") from error
        self._registered: dict[Region, Any] = {}
        self._known: OrderedDict[str, _Known] = (
            OrderedDict()
        )  # by agent, those read last at the end

    def register(self, region: Region) -> None:
        """Make a region readable; sets its metadata. Raises TransferError."""
        agent = self._agent
        try:
            handle = agent.register_memory([(region.address, len(region.view), 0, "")], MEMORY)
            region.metadata = agent.get_partial_agent_metadata(handle, True, [BACKEND])
        except Exception as error:  # too much to be locked, for example
            reason = f"NIXL does not register {len(region.view)} bytes: {error}"
            raise TransferError("unavailable", "", reason) from error
        self._registered[region] = handle

    def deregister(self, region: Region) -> None:
        self._agent.deregister_memory(self._registered.pop(region))

    async def read(
        self, peer: str, owner: TransferReply, into: Region, pieces: Iterable[Piece]
    ) -> None:
        """Fetch pieces of the memory that `owner` describes. Returns or raises when all rests.

        Raises TransferError.
        """
        transfers: list[Any] = []
        try:
            self._meet(peer, owner)
            for batch in batches(pieces, BATCH_BYTES, BATCH_PIECES):
                transfers.append(self._post(owner, into, batch))
                await asyncio.sleep(0)
            for transfer in transfers:
                while self._agent.check_xfer_state(transfer) == "PROC":
                    await asyncio.sleep(POLL_S)
            good = all(self._agent.check_xfer_state(t) == "DONE" for t in transfers)
        except Exception as error:
            self._forget(owner.agent)
            raise TransferError("failed", peer, f"NIXL: {error}") from error
        finally:
            await self._settle(peer, transfers)
        if not good:
            self._forget(owner.agent)
            raise TransferError("failed", peer, "NIXL gave the transfer up")

    def forget(self, peer: str) -> None:
        """The process at this address is gone, and what NIXL knows of it is of no use."""
        for agent in [agent for agent, known in self._known.items() if known.peer == peer]:
            self._forget(agent)

    def _meet(self, peer: str, owner: TransferReply) -> None:
        known = self._known.get(owner.agent)
        if known is None:
            self.forget(peer)  # another process had this address before
            known = self._known[owner.agent] = _Known(peer, set())
        if owner.metadata not in known.metadata:
            self._agent.add_remote_agent(owner.metadata)
            known.metadata.add(owner.metadata)
        self._known.move_to_end(owner.agent)
        while len(self._known) > MOST_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, agent: str) -> None:
        known = self._known.pop(agent, None)
        if known is None or not known.metadata:
            return
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:  # NIXL may have noticed by itself
            log.debug("NIXL does not forget %s: %s", known.peer, error)

    def _post(self, owner: TransferReply, into: Region, batch: list[Piece]) -> Any:
        here = [(into.address + piece.local, piece.length, 0) for piece in batch]
        there = [(owner.base + piece.remote, piece.length, 0) for piece in batch]
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(here, MEMORY),
            agent.get_xfer_descs(there, MEMORY),
            owner.agent,
        )
        agent.transfer(handle)
        return handle

    async def _settle(self, peer: str, transfers: list[Any]) -> None:
        """Release what is over; raises TransferError if some of it does not come to an end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        for transfer in transfers:
            while self._moves(transfer):
                if loop.time() > deadline:
                    detail = f"NIXL has not let go of the memory after {SETTLE_S:g} s"
                    raise TransferError("timeout", peer, detail, settled=False)
                await asyncio.sleep(POLL_S)
            self._agent.release_xfer_handle(transfer)

    def _moves(self, transfer: Any) -> bool:
        try:
            return bool(self._agent.check_xfer_state(transfer) == "PROC")
        except Exception as error:  # such as a peer that has gone
            log.debug("a transfer has failed: %s", error)
            return False


def _make(name: str) -> Any:
    api = importlib.import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every start
    return api.nixl_agent(name, api.nixl_agent_config(backends=[BACKEND]))
