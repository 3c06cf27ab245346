"""Pins and losses by tenant, and KV memory by tier."""

from msgspec.structs import replace

from kvmesh.bus.messages import CacheAccount, CacheLoss, Capacity, Instance, NodeStore, Outcome
from kvmesh.dashboard.state.kv_tiers import tier_rows
from kvmesh.dashboard.state.pins import TenantNames, pin_rows, stored_head
from kvmesh.dashboard.state.retention import tenant_rows
from kvmesh.frontend.http.cache.pin_store import PinHead
from kvmesh.frontend.namespaces import inferred, scoped
from kvmesh.observer.activity import by_tenant
from kvmesh.observer.fleet import FleetView

TAG = "0123456789abcdef"
HEAD = PinHead("pin", "m", 100, 90, 10.0, 100.0, 48)
OUTCOME = Outcome(
    request="r",
    instance="w",
    time=1.0,
    cached_tokens=40,
    output_tokens=1,
    ttft_s=0.1,
    total_s=0.2,
    finish="stop",
    tenant="acme",
    session=scoped(f"{TAG}/part", "s"),
    prompt_tokens=100,
)


def lost(**tokens: int) -> Outcome:
    losses = [CacheLoss(first=0, tokens=n, reason=r) for r, n in tokens.items()]
    losses.append(CacheLoss(first=0, tokens=7, reason="elsewhere:load"))
    losses.append(CacheLoss(first=0, tokens=3, reason="of a later release"))
    account = CacheAccount(prompt_tokens=100, own=40, possible=90, losses=losses)
    return replace(OUTCOME, cache=account)


def test_a_pin_has_the_name_that_a_session_of_its_tenant_told() -> None:
    names = TenantNames()
    pins = [stored_head(f"{TAG}.none.d1", HEAD), stored_head("none.none.d2", HEAD)]
    pins.append(stored_head(f"{TAG}.fedcba9876543210.d3", HEAD))
    before = [(row.tenant, row.part) for row in pin_rows(pins, names, 20.0)]
    assert before[:2] == [("(tag 01234567…)", ""), ("", "")]
    assert before[2] == ("(tag 01234567…)", "tag fedcba98…")
    names.learn(replace(OUTCOME, session="", tenant="other"))
    names.learn(replace(OUTCOME, session="plain", tenant="other"))
    names.learn(replace(OUTCOME, session=inferred(TAG, "conversation 1")))
    row, *_ = pin_rows(pins, names, 20.0)
    assert (row.tenant, row.tokens, row.blocks, row.priority) == ("acme", 100, 6, 90)
    assert (row.age_s, row.left_s) == (10.0, 80.0)
    assert pin_rows(pins, names, 100.0) == []


def test_losses_of_a_tenant_are_told_by_reason() -> None:
    tenants = by_tenant(60.0)
    tenants.add(lost(evicted=10, clipped=5), 1.0)
    tenants.add(lost(evicted=1, worker_gone=2), 2.0)
    names = TenantNames()
    names.learn(OUTCOME)
    pins = pin_rows([stored_head(f"{TAG}.none.d", HEAD)], names, 20.0)
    (row,) = tenant_rows(tenants.rows(2.0), pins)
    assert (row.tenant, row.prompt_tokens, row.pins, row.pinned_tokens) == ("acme", 200, 1, 100)
    assert (row.evicted, row.clipped, row.worker_gone) == (11, 5, 2)
    assert (row.elsewhere, row.other, row.expired) == (14, 6, 0)
    assert row.lost_tokens == 11 + 5 + 2 + 14 + 6
    assert (row.reused, row.possible) == (0.4, 0.9)


def test_a_tenant_with_pins_alone_has_a_row() -> None:
    pins = pin_rows([stored_head(f"{TAG}.none.d", HEAD)] * 2, TenantNames(), 20.0)
    (row,) = tenant_rows([], pins)
    assert (row.tenant, row.pins, row.reused, row.lost_tokens) == ("(tag 01234567…)", 2, None, 0)


def test_tiers_of_engines_and_block_managers_are_summed() -> None:
    capacity = Capacity(
        blocks=10, max_sequences=1, max_batched_tokens=1, dp_ranks=2, tier_blocks=[5, 0, 7]
    )
    card = Instance(instance="w-1", role="worker", name="w", version="", started=0.0)  # type: ignore[arg-type]
    store = NodeStore(directory="", tier_bytes=[100, 0, 300], tier_blocks=[10])
    cards = {
        "w-1": replace(card, capacity=capacity),
        "w-2": replace(card, instance="w-2", capacity=capacity),
        "kv-1": replace(card, instance="kv-1", store=store),
    }
    rows = tier_rows(cards, FleetView().rows(0.0))
    assert [(r.tier, r.owner, r.processes, r.blocks, r.bytes) for r in rows] == [
        ("host memory", "engines", 2, 20, None),
        ("host memory", "block managers", 1, 10, 100),
        ("remote store", "engines", 2, 28, None),
        ("remote store", "block managers", 1, None, 300),
    ]
    assert tier_rows({}, []) == []
