"""Reads of another process's memory through NIXL: RDMA, or a copy by the kernel on one machine.

On one machine NIXL copies while a transfer is posted and holds the GIL. Reads are therefore posted
in batches, between which the event loop runs. NIXL's own thread is off, since it would occupy a
CPU: the reader makes progress as it waits, and the owner, where the network needs it, as `progress`
is called.

What an agent has loaded of another one is never taken away by later metadata: regions that the
owner has deregistered stay known, with keys that may belong to nothing. Readers therefore drop an
owner whose regions have changed and load it again.
"""

import asyncio
import importlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from kvmesh.transfer.channel import TransferReply
from kvmesh.transfer.errors import TransferError
from kvmesh.transfer.grants import LentBytes, Region
from kvmesh.transfer.memory_ranges import Piece, batches

log = logging.getLogger(__name__)
BACKEND = "UCX"
MEMORY = "DRAM"
BATCH_BYTES = 16 << 20
BATCH_PIECES = 4096
POLL_S = 0.0005
SETTLE_S = 5.0
MAX_PEERS = 256  # the end of a worker is not reported here, so old peers are dropped


@dataclass(eq=False)
class _Peer:
    """Another process: its address, the loaded metadata of its regions, and the running reads."""

    address: str
    metadata: bytes
    reads: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def end_read(self) -> None:
        self.reads -= 1
        if not self.reads:
            self.idle.set()


class NixlAgent:
    """The NIXL agent of this process; `metadata` describes all regions that are registered now."""

    def __init__(self) -> None:
        """Raises TransferError if NIXL is not installed or does not start."""
        self.name = secrets.token_hex(8)
        try:
            self._agent = _make(self.name)
        except Exception as error:  # NIXL's errors have no common base class
            raise TransferError("unavailable", "", f"NIXL does not start: {error}") from error
        self.metadata = b""
        self._registered: dict[LentBytes, Any] = {}
        self._changing = Lock()
        # by agent, least recently read first
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def register(self, region: LentBytes) -> None:
        """Make a region readable, or writable for reads.

        Other threads may do it. Raises TransferError.
        """
        try:
            with self._changing:
                memory = [(region.address, region.size, 0, "")]
                self._registered[region] = self._agent.register_memory(memory, MEMORY)
                self.metadata = self._agent.get_agent_metadata()
        except Exception as error:  # the limit of locked memory, for example
            reason = f"NIXL does not register {region.size} bytes: {error}"
            raise TransferError("unavailable", "", reason) from error

    def deregister(self, region: LentBytes) -> None:
        with self._changing:
            self._agent.deregister_memory(self._registered.pop(region))
            self.metadata = self._agent.get_agent_metadata()

    async def read(
        self, peer: str, owner: TransferReply, into: Region, pieces: Iterable[Piece]
    ) -> None:
        """Read pieces of the memory that `owner` describes; returns when no transfer is running.

        Raises TransferError.
        """
        known = await self._loaded(peer, owner)
        known.reads += 1
        try:
            await self._read(peer, owner, into, pieces)
        finally:
            known.end_read()

    async def _read(
        self, peer: str, owner: TransferReply, into: Region, pieces: Iterable[Piece]
    ) -> None:
        transfers: list[Any] = []
        try:
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
            raise TransferError("failed", peer, "NIXL aborted the transfer")

    def progress(self) -> None:
        """Let reads by other processes go on."""
        try:
            self._agent.get_new_notifs()
        except Exception as error:  # such as a peer that has gone
            log.debug("NIXL makes no progress: %s", error)

    def forget(self, peer: str) -> None:
        """Drop the NIXL state of the process at this address, which has ended."""
        for agent in [agent for agent, known in self._peers.items() if known.address == peer]:
            self._forget(agent)

    async def _loaded(self, peer: str, owner: TransferReply) -> _Peer:
        """The owner with the regions that it describes; waits for reads of others that it had."""
        known = self._peers.get(owner.agent)
        while known is not None and known.metadata != owner.metadata and known.reads:
            known.idle.clear()
            await known.idle.wait()
            known = self._peers.get(owner.agent)
        if known is None or known.metadata != owner.metadata:
            self._forget(owner.agent)
            self.forget(peer)  # an earlier process at this address
            try:
                self._agent.add_remote_agent(owner.metadata)
            except Exception as error:
                raise TransferError("failed", peer, f"NIXL: {error}") from error
            known = self._peers[owner.agent] = _Peer(peer, owner.metadata)
        self._peers.move_to_end(owner.agent)
        while len(self._peers) > MAX_PEERS:
            self._forget(next(iter(self._peers)))
        return known

    def _forget(self, agent: str) -> None:
        known = self._peers.pop(agent, None)
        if known is None:
            return
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:  # NIXL may have dropped it before
            log.debug("NIXL does not forget %s: %s", known.address, error)

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
        """Release finished transfers; raises TransferError if one does not end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        for transfer in transfers:
            while self._is_running(transfer):
                if loop.time() > deadline:
                    detail = f"NIXL still uses the memory after {SETTLE_S:g} s"
                    raise TransferError("timeout", peer, detail, settled=False)
                await asyncio.sleep(POLL_S)
            self._agent.release_xfer_handle(transfer)

    def _is_running(self, transfer: Any) -> bool:
        try:
            return bool(self._agent.check_xfer_state(transfer) == "PROC")
        except Exception as error:  # such as a peer that has gone
            log.debug("a transfer has failed: %s", error)
            return False


def _make(name: str) -> Any:
    api = importlib.import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs every start
    threads = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = api.nixl_agent_config(backends=[BACKEND], enable_prog_thread=False, sync_mode=threads)
    return api.nixl_agent(name, config)
