"""Clients of the node's kvbm in a process of vLLM, with an event loop in a thread of their own."""

import asyncio
import dataclasses
import os
import threading
from array import array
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct

from kvmesh.blocks.attachment import WorkerIdentity
from kvmesh.blocks.digests import DigestChain, part_digests
from kvmesh.blocks.kvbm_client import KvbmClient, KvbmPrompt
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import KvLayout
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.hashing import HASH_BYTES, block_hashes
from kvmesh.settings.schema import TracingSettings
from kvmesh.settings.secret_file import FileSecret, read_secret
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.engines.vllm.kvbm.refused_subjects import RefusalTeller
from kvmesh.worker.engines.vllm.kvbm.shared_tracing import shared_tracing

T = TypeVar("T")
BUS_OPTIONS_VARIABLE = "KVMESH_BUS"
START_S = 10.0


class BridgeOptions(Struct, frozen=True, kw_only=True):
    """Options of the connector: its identity on the node, and bounds as in `[worker]`.

    `flush_s` bounds the writing of the blocks that wait when vLLM stops. `tracing` is set if spans
    are to be exported.

    vLLM logs these options, so credentials of the bus and headers for the collector of traces are
    passed in the environment instead.
    """

    weights: str
    node: str
    instance: str
    model: str
    lease_s: float
    wait_s: float
    queue: int
    flush_s: float = 0.0
    tracing: TracingSettings | None = None


class _Exported(Struct):
    """Bus options, and the files of those that are secrets from files, which may change."""

    options: BusOptions
    files: dict[str, Path]


def export_bus_options(options: BusOptions) -> None:
    """Export bus options to the connectors in this process and its child processes."""
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    files = {name: v.path for name, v in fields.items() if isinstance(v, FileSecret)}
    # str and Path convert files, the only fields that JSON has no type for
    text = msgspec.json.encode(_Exported(options, files), enc_hook=str).decode()
    os.environ[BUS_OPTIONS_VARIABLE] = text


def inherited_bus_options() -> BusOptions:
    """The options given to `export_bus_options`, from the environment."""
    text = os.environ[BUS_OPTIONS_VARIABLE]
    found = msgspec.json.decode(text, type=_Exported, dec_hook=lambda _, path: Path(path))
    secrets: dict[str, Any] = {name: read_secret(path) for name, path in found.files.items()}
    return dataclasses.replace(found.options, **secrets)


class KvbmBridge:
    """A client of the kvbm for each part of a block, in a thread.

    Raises BusError if the bus is unreachable. vLLM's thread calls the methods; those of the
    subclasses do not block.
    """

    def __init__(
        self, options: BridgeOptions, name: str, layouts: list[KvLayout], device: torch.device
    ) -> None:
        self._options = options
        self._layouts = layouts
        self._arenas = ArenaTensors(device)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmesh", daemon=True)
        self._thread.start()
        self._bus, self._clients = self._wait(self._open(f"{options.instance}-{name}"))

    def close(self) -> None:
        """Release everything and stop the thread; blocks until done."""
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    @property
    def is_attached(self) -> bool:
        """True while the kvbm serves all parts."""
        return all(client.key is not None for client in self._clients)

    async def _open(self, name: str) -> tuple[Bus, list[KvbmClient]]:
        options = self._options
        bus = await Bus.connect(inherited_bus_options(), name, START_S)
        self._teller = RefusalTeller(bus)
        limits = StreamLimits(lease_s=options.lease_s)
        clients = []
        for layout in self._layouts:
            instance = f"{name}-{layout.part}" if layout.parts > 1 else name
            identity = WorkerIdentity(
                node=options.node, instance=instance, model=options.model, layout=layout
            )
            client = KvbmClient(bus, limits, identity, self._arenas)
            await client.open()
            clients.append(client)
        if options.tracing is not None:
            await shared_tracing.open(bus, options.tracing, name)
        return bus, clients

    async def _close(self) -> None:
        for client in self._clients:
            await client.close()
        await self._teller.close()
        await self._bus.close()
        if self._options.tracing is not None:
            await shared_tracing.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * START_S)


class PromptChain:
    """Digests of one growing prompt, from which those of all parts follow."""

    def __init__(self, options: BridgeOptions, origin: RequestOrigin, lead: KvLayout) -> None:
        self._origin = origin
        self._block_size = lead.block_size
        self._digests = DigestChain(options.model, origin.adapter, origin.tenant, lead)

    def prompts(
        self, tokens: "array[int]", key: bytes, layouts: list[KvLayout]
    ) -> list[KvbmPrompt]:
        """The full blocks of `tokens`, in each of the parts, under the mesh's id of the request."""
        origin = self._origin
        local, sequence = block_hashes(tokens.tobytes(), self._block_size, origin.salt)
        lead = self._digests.upto(key, tokens, len(sequence) // HASH_BYTES)
        return [
            KvbmPrompt(
                request=origin.request,
                digests=part_digests(key, lead, layout),
                sequence_hashes=sequence,
                local=local,
                salt=origin.salt,
                tenant=origin.tenant,
                session=origin.session,
                retention=origin.ranges,
                traceparent=origin.traceparent,
                ephemeral=origin.ephemeral,
                conversation=origin.conversation,
                tentative=origin.tentative,
            )
            for layout in layouts
        ]
