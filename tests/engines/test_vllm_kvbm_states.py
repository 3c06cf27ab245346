"""States of linear attention that the connector saves and loads, in steps as vLLM reports them."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.engines.vllm.kvbm.parts import KvGroup, KvParts

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
SIZE = 4
KV = KvLayout(
    weights="w", dtype="float32", item_bytes=4, block_size=SIZE, layers=[LayerLayout(1, 1, 1)]
)
STATE = KvLayout(
    weights="w",
    dtype="state",
    item_bytes=1,
    block_size=SIZE,
    layers=[LayerLayout(1, 3, 0)],
    window=SIZE,
)
PROMPT = 18
ORIGIN = RequestOrigin(request="r", salt=1, prompt_tokens=PROMPT)


def parts(is_speculative: bool = False) -> KvParts:
    """Full attention, vLLM's group 2, and two groups with states."""
    kv = KvGroup(index=2, layers=["kv"], layout=KV)
    one, other = (
        KvGroup(
            index=index,
            layers=[f"state {index}"],
            layout=STATE,
            has_state=True,
            is_speculative=is_speculative,
        )
        for index in (0, 1)
    )
    return KvParts(block_size=SIZE, groups=[kv, one, other], shards=1, replicas=1)


class Steps:
    """A scheduler's half of the connector with one request of 18 tokens, and what it saves."""

    def __init__(self, is_speculative: bool = False) -> None:
        from kvmesh.worker.engines.vllm.kvbm.scheduler_side import SchedulerSide

        bridge: Any = SimpleNamespace(begin_copy=lambda _: None, release_lookup=lambda _: None)
        self.side = SchedulerSide(bridge, parts(is_speculative))
        self.request = SimpleNamespace(
            request_id="r",
            num_prompt_tokens=PROMPT,
            all_token_ids=list(range(PROMPT)),
            kv_transfer_params={"kvmesh": msgspec.to_builtins(ORIGIN)},
            num_tokens=PROMPT,
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
        )
        self.side.update_state_after_alloc(self.request, None, 0)
        self.computed = 0

    def run(self, tokens: int, offers: list[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
        """Schedule `tokens`; returns the first block and the blocks saved of each group, if any."""
        is_first = not self.computed
        new = SimpleNamespace(
            req_id="r",
            block_ids=([0, 5, 6], [0, 7, 8], [1, 2, 3, 4, 9]),
            num_computed_tokens=0,
        )
        cached = SimpleNamespace(
            req_ids=[] if is_first else ["r"],
            new_block_ids=[] if is_first else [None],
            num_computed_tokens=[] if is_first else [self.computed],
            resumed_req_ids=set(),
        )
        output = SimpleNamespace(
            scheduled_new_reqs=[new] if is_first else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"r": tokens},
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={"r": offers}),
        )
        self.computed += tokens
        saves = self.side.build_meta(output).saves
        return [(group.first, group.blocks) for save in saves for group in save.groups]


def test_states_are_saved_from_the_blocks_that_vllm_offers_alone() -> None:
    steps = Steps()
    assert steps.run(8, [(0, 50, 8), (1, 60, 8)]) == [(0, [1, 2]), (1, [50]), (1, [60])]
    assert steps.run(4, []) == [(2, [3]), (2, []), (2, [])]


def test_a_state_that_is_offered_later_is_saved_with_its_own_end() -> None:
    steps = Steps()
    assert steps.run(12, []) == [(0, [1, 2, 3]), (0, []), (0, [])]
    assert steps.run(1, [(1, 61, 12), (0, 51, 12)]) == [(3, []), (2, [51]), (2, [61])]
    assert steps.run(1, [(1, 61, 12), (0, 51, 12)]) == []


@pytest.mark.parametrize(
    "offers",
    [
        [(0, 50, 8)],  # of one group alone
        [(0, 50, 8), (1, 0, 8)],  # of the null block
        [(0, 50, 6), (1, 60, 6)],  # inside a block
        [(0, 50, 12), (1, 60, 12)],  # of tokens that are not known
        [(0, 50, 4), (1, 60, 8)],  # at different ends
        [(2, 50, 8), (1, 60, 8)],  # of a group without states
    ],
)
def test_other_offers_are_ignored(offers: list[tuple[int, int, int]]) -> None:
    assert Steps().run(8, offers) == [(0, [1, 2]), (0, []), (0, [])]


def test_beside_speculation_only_states_of_prompts_are_saved() -> None:
    steps = Steps(is_speculative=True)
    assert steps.run(16, [(0, 50, 16), (1, 60, 16)])[1:] == [(3, [50]), (3, [60])]
    steps.request.all_token_ids = list(range(20))
    assert steps.run(4, [(0, 51, 20), (1, 61, 20)])[1:] == [(4, []), (4, [])]
    steps = Steps()
    steps.run(16, [])
    steps.request.all_token_ids = list(range(20))
    assert steps.run(4, [(0, 51, 20), (1, 61, 20)])[1:] == [(4, [51]), (4, [61])]


def test_a_state_is_loaded_only_into_the_last_block() -> None:
    from array import array

    from kvmesh.worker.engines.vllm.kvbm.lookups import LookupResult, PartBlocks

    side = Steps().side
    found = LookupResult(
        0,
        3,
        [
            PartBlocks(0, "arena", array("Q", [10, 20, 30]), bytearray([1, 1, 1])),
            PartBlocks(2, "arena", array("Q", [40]), bytearray([1])),
            PartBlocks(2, "arena", array("Q", [50]), bytearray([1])),
        ],
    )

    def loads(*tables: list[int]) -> list[tuple[list[int], list[int]]]:
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        made = side._group_loads(found, blocks, 0, 3)
        return [(load.blocks, list(load.offsets[0])) for load in made]

    assert loads([0, 0, 7], [0, 0, 8], [1, 2, 3]) == [
        ([1, 2, 3], [10, 20, 30]),
        ([7], [40]),
        ([8], [50]),
    ]
    assert loads([0, 0, 0], [0, 0, 8], [1, 2, 3]) == []
    assert loads([0, 6, 7], [0, 0, 8], [1, 2, 3]) == []
