"""The scheduler's half of the connector: plans the loads and saves of each step."""

import logging
from array import array
from collections import Counter
from typing import Any

from msgspec import Struct
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvmesh.bus.messages import adapter_name
from kvmesh.worker.adapters.connector_series import CORRUPT, LOAD_RATIO, LOADED
from kvmesh.worker.adapters.request_origin import OriginError, RequestOrigin, request_origin
from kvmesh.worker.engines.vllm.kvbm.lookups import LookupResult, SchedulerBridge
from kvmesh.worker.engines.vllm.kvbm.parts import KvParts
from kvmesh.worker.engines.vllm.kvbm.stats import KvmeshConnectorStats

log = logging.getLogger(__name__)
NULL_BLOCK = 0  # vLLM's place holder for blocks that a sliding window has left behind


class GroupLoad(Struct):
    """vLLM blocks of one group to fill, and where their content is in the arena, by shard."""

    blocks: list[int]
    offsets: list["array[int]"]


class BlockLoad(Struct):
    """Blocks of a request to fill from the named arena, by group; none if the load has failed."""

    request: str
    arena: str
    groups: list[GroupLoad]


class GroupSave(Struct):
    """vLLM blocks of one group that hold the blocks of a prompt from `first` on."""

    first: int
    blocks: list[int]


class BlockSave(Struct):
    """Blocks that are full after this step, by group.

    None ends after the last of `tokens`, which follow those of the request's earlier saves.
    """

    request: str
    origin: RequestOrigin
    tokens: "array[int]"
    groups: list[GroupSave]


class KvmeshConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """Loads and saves of one step, and the number of prompt tokens that it computes.

    `finished` are requests without further saves.
    """

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.finished: set[str] = set()
        self.loads: list[BlockLoad] = []
        self.saves: list[BlockSave] = []


class ConnectorRequest:
    """A request in vLLM with its block ids by group; the first `saved_blocks` are in the kvbm.

    Of states, those after the first `saved_states` blocks are not. The workers have the tokens of
    the first `sent_blocks`.
    `received_after`: the blocks after this many come from another engine; None if none do.
    """

    def __init__(self, request: Any, origin: RequestOrigin, received_after: int | None) -> None:
        self.request = request
        self.origin = origin
        self.received_after = received_after
        self.blocks: list[list[int]] = []
        self.saved_blocks = 0
        self.saved_states = 0
        self.sent_blocks = 0

    def add_blocks(self, blocks: list[list[int]]) -> None:
        for table, fresh in zip(self.blocks, blocks, strict=True):
            table.extend(fresh)


class SchedulerSide:
    """Tracks the requests of the mesh in vLLM's scheduler."""

    def __init__(self, bridge: SchedulerBridge, parts: KvParts) -> None:
        self.bridge = bridge
        self._parts = parts
        self._block_size = parts.block_size
        self._requests: dict[str, ConnectorRequest] = {}
        self._held_blocks: dict[str, int] = {}
        self._received_after: dict[str, int] = {}
        self._failed: set[str] = set()
        self._loaded: dict[str, list[int]] = {}
        self._reported = (0, 0.0)
        self._loads: list[BlockLoad] = []
        self._finished: set[str] = set()

    def get_num_new_matched_blocks(self, request: Any, held: int) -> tuple[int | None, bool]:
        request_id = request.request_id
        origin, reusable = _origin(request), (request.num_tokens - 1) // self._block_size
        self._received_after.pop(request_id, None)
        if origin is None:
            return 0, False
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            # a lookup in progress would delay what another connector is about to receive
            self._received_after[request_id] = held
            return 0, False
        if reusable <= held or request_id in self._failed:
            return 0, False
        tokens = array("I", request.all_token_ids[: reusable * self._block_size])
        found = self.bridge.lookup(request_id, origin, tokens, held)
        if found is None:
            return None, False
        self._held_blocks[request_id] = held
        return found * self._block_size, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, count: int) -> None:
        request_id, origin = request.request_id, _origin(request)
        if origin is None:
            return
        received_after = self._received_after.pop(request_id, None)
        tracked = ConnectorRequest(request, origin, received_after)
        tracked = self._requests.setdefault(request_id, tracked)
        tracked.received_after = received_after
        held, found = self._held_blocks.pop(request_id, 0), self.bridge.begin_copy(request_id)
        if not count:
            self.bridge.release_lookup(request_id)
            return
        groups = [] if found is None else self._group_loads(found, blocks, held, held + count)
        if found is None or not groups:  # the load fails, and vLLM recomputes the blocks
            log.warning("request %s: what was found for it does not fit any more", request_id)
            self._loads.append(BlockLoad(request_id, "", []))
            return
        self._loads.append(BlockLoad(request_id, found.arena, groups))
        blocks_of = Counter(found.tiers(held, held + count))
        found.loaded = [blocks_of[n] for n in range(1, max(blocks_of) + 1)]
        self._loaded[origin.request] = found.loaded

    def build_meta(self, output: Any) -> KvmeshConnectorMetadata:
        metadata, cached = KvmeshConnectorMetadata(), output.scheduled_cached_reqs
        metadata.loads, self._loads = self._loads, []
        metadata.finished, self._finished = self._finished, set()
        for new in output.scheduled_new_reqs:
            self._set_block_ids(new.req_id, new.block_ids, new.num_computed_tokens)
            self._schedule_saves(metadata, new.req_id, new.num_computed_tokens, output)
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request, blocks, computed in rows:
            if request in cached.resumed_req_ids:
                self._set_block_ids(request, blocks, computed)
            elif request in self._requests:
                self._requests[request].add_blocks(self._of_groups(blocks))
            self._schedule_saves(metadata, request, computed, output)
        return metadata

    def end_loads(self, received: set[str], failed: set[str]) -> None:
        """Release the blocks of loads that have ended; those of `failed` are not tried again."""
        self._failed |= failed
        for request in received:
            self.bridge.release_lookup(request)

    def take_stats(self) -> KvmeshConnectorStats | None:
        """Blocks loaded by request and tier, corrupt blocks and the cost of a load.

        None if nothing changed.
        """
        loaded, figures = self._loaded, (self.bridge.corrupt, self.bridge.load_ratio)
        if not loaded and figures == self._reported:
            return None
        self._loaded, self._reported = {}, figures
        corrupt, ratio = figures
        return KvmeshConnectorStats({LOADED: loaded, CORRUPT: corrupt, LOAD_RATIO: ratio})

    def request_finished(self, request: str) -> None:
        self._held_blocks.pop(request, None)
        self._received_after.pop(request, None)
        self._failed.discard(request)
        tracked = self._requests.pop(request, None)
        if tracked is None:
            self.bridge.release_lookup(request)
        else:
            self._finished.add(request)
            self.bridge.finish_request(request, tracked.origin)

    def _group_loads(
        self, found: LookupResult, blocks: Any, held: int, end: int
    ) -> list[GroupLoad]:
        """Loads of the blocks from `held` to before `end`, by group; empty if something is missing.

        vLLM allocates no blocks for what a window has left behind at `end`.
        """
        tables, shards, loads = blocks.get_block_ids(), self._parts.shards, []
        for number, group in enumerate(self._parts.groups):
            table = tables[group.index]
            wanted = [i for i in range(held, end) if table[i] != NULL_BLOCK]
            if group.has_state and wanted != [end - 1]:
                return []
            load = GroupLoad([table[i] for i in wanted], [])
            for part in found.parts[number * shards : (number + 1) * shards]:
                if wanted and (wanted[0] < part.first or wanted[-1] >= part.end):
                    return []
                load.offsets.append(array("Q", (part.offsets[i - part.first] for i in wanted)))
            loads.append(load)
        return loads

    def _set_block_ids(self, request: str, blocks: Any, computed: int) -> None:
        tracked = self._requests.get(request)
        if tracked is None:
            return
        tracked.blocks = self._of_groups(blocks)
        known, tracked.received_after = tracked.received_after, None
        known = computed // self._block_size if known is None else known
        tracked.saved_blocks = max(tracked.saved_blocks, known)
        tracked.saved_states = max(tracked.saved_states, known)

    def _of_groups(self, blocks: Any) -> list[list[int]]:
        """Block ids in the order of our groups, from vLLM's; None stands for none."""
        return [list(blocks[group.index]) if blocks else [] for group in self._parts.groups]

    def _schedule_saves(
        self, metadata: KvmeshConnectorMetadata, request: str, computed: int, output: Any
    ) -> None:
        """Plan the saves of the blocks that are full after the step."""
        tracked = self._requests.get(request)
        if tracked is None:
            return
        after = computed + output.num_scheduled_tokens[request]
        metadata.prefill_tokens += max(0, min(after, tracked.request.num_prompt_tokens) - computed)
        if tracked.origin.ephemeral:
            return
        known = len(tracked.request.all_token_ids)
        full_blocks, first = min(after, known) // self._block_size, tracked.saved_blocks
        states = self._states(tracked, full_blocks, output.kv_connector_block_state)
        if full_blocks <= first and not states:
            return
        sent, size = tracked.sent_blocks, self._block_size
        tracked.saved_blocks = max(first, full_blocks)
        tracked.sent_blocks = max(sent, full_blocks)
        tokens = array("I", tracked.request.all_token_ids[sent * size : full_blocks * size])
        groups = [
            states.get(number) or _group_save([] if group.has_state else table, first, full_blocks)
            for number, (group, table) in enumerate(
                zip(self._parts.groups, tracked.blocks, strict=True)
            )
        ]
        metadata.saves.append(BlockSave(request, tracked.origin, tokens, groups))

    def _states(
        self, tracked: ConnectorRequest, full_blocks: int, offered: Any
    ) -> dict[int, GroupSave]:
        """The states to save after this step, by group: those at the end of one block, or none.

        A request has a running state, which each step overwrites. vLLM offers a block with the
        state at a block's end in the step that computes it or later, and keeps it through the step.
        """
        numbers = self._parts.states
        if not numbers or offered is None:
            return {}
        last = full_blocks * self._block_size
        if self._parts.is_speculative:
            last = min(last, tracked.request.num_prompt_tokens)
        indices = {self._parts.groups[number].index: number for number in numbers}
        found: dict[int, dict[int, GroupSave]] = {}
        offers = offered.boundary_state_offloads.get(tracked.request.request_id, [])
        for index, block, tokens in offers:
            end, rest = divmod(tokens, self._block_size)
            is_new = tracked.saved_states < end and tokens <= last
            if index in indices and block != NULL_BLOCK and is_new and not rest:
                found.setdefault(end, {})[indices[index]] = GroupSave(end - 1, [block])
        ends = [end for end, states in found.items() if len(states) == len(numbers)]
        if not ends:
            return {}
        tracked.saved_states = max(ends)
        return found[tracked.saved_states]


def _group_save(table: list[int], first: int, end: int) -> GroupSave:
    """The blocks to save of one group, without those that its window has left behind."""
    while first < min(end, len(table)) and table[first] == NULL_BLOCK:
        first += 1
    return GroupSave(first, table[first:end])


def _origin(request: Any) -> RequestOrigin | None:
    """The origin of a request whose KV follows from its tokens and the origin's adapter.

    Callers of a server may send any origin: blocks must not be stored under another one's digests.
    """
    try:
        origin = request_origin(request)
        if origin is not None:
            lora = request.lora_request
            adapter = lora.lora_name if lora is not None else ""
            if adapter != origin.adapter:
                raise OriginError(f"its adapter is {adapter!r}, its origin's is {origin.adapter!r}")
            if request.mm_features or request.prompt_embeds is not None:
                raise OriginError("its prompt has more than tokens")
    except OriginError as error:
        log.warning("request %s uses no lower tiers: %s", request.request_id, error)
        return None
    if origin is not None and origin.adapter and adapter_name(origin.adapter) == origin.adapter:
        return None  # a bare name says nothing of the adapter's content
    return origin
