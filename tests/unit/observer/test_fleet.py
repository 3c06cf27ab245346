"""States, rates and shares of the fleet view."""

from msgspec.structs import replace

from kvmesh.bus.messages import Capacity, Instance, Load, ModelCard, Role, Starting
from kvmesh.observer.fleet import SILENT_S, FleetRow, FleetView
from kvmesh.router.state.rank_speeds import MeasuredSpeed

CARD = Instance(
    instance="worker-0-1",
    role=Role.WORKER,
    name="worker-0",
    version="1",
    started=0.0,
    model=ModelCard(name="demo", context=4096, block_size=16, files=""),
    capacity=Capacity(blocks=100, max_sequences=8, max_batched_tokens=512, dp_ranks=2),
)


def load(steps: int, rank: int = 0, **fields: int) -> Load:
    facts = {
        "running": 2,
        "waiting": 1,
        "active_blocks": 25,
        "cached_blocks": 50,
        "total_blocks": 100,
        "prefill_tokens": 0,
        "prompt_tokens": 100 * steps,
        "cached_tokens": 75 * steps,
        "output_tokens": 10 * steps,
        "requests": steps,
        **fields,
    }
    return Load(instance=CARD.instance, rank=rank, steps=steps, **facts)


def only(view: FleetView, now: float) -> FleetRow:
    (row,) = view.rows(now)
    return row


def test_figures_are_sums_over_ranks() -> None:
    view = FleetView()
    view.joined(CARD, 0.0)
    for step in range(4):
        view.load(load(step), step)
        view.load(load(step, rank=1), step)
    row = only(view, 3.0)
    assert (row.instance, row.role, row.model, row.state) == (
        "worker-0-1",
        "worker",
        "demo",
        "ready",
    )
    assert (row.running, row.waiting, row.kv_used, row.kv_cached) == (4, 2, 0.25, 0.5)
    assert (row.prompt_tokens_per_s, row.output_tokens_per_s, row.reused) == (200.0, 20.0, 0.75)
    assert row.speed is None


def test_a_restarted_engine_has_no_negative_rates() -> None:
    view = FleetView()
    view.joined(CARD, 0.0)
    for step, now in ((8, 0.0), (9, 1.0), (0, 2.0), (1, 3.0)):
        view.load(load(step), now)
    assert only(view, 3.0).prompt_tokens_per_s == 100.0


def test_a_worker_without_loads_is_silent() -> None:
    view = FleetView()
    view.joined(CARD, 0.0)
    assert only(view, SILENT_S).state == "ready"
    assert only(view, SILENT_S + 1).state == "silent"
    view.load(load(1), SILENT_S + 1)
    assert only(view, SILENT_S + 2).state == "ready"
    view.joined(replace(CARD, draining=True), SILENT_S + 2)
    assert only(view, SILENT_S + 2).state == "draining"


def test_loads_that_no_card_covers_are_ignored() -> None:
    view = FleetView()
    view.load(load(1), 0.0)
    view.joined(CARD, 0.0)
    view.load(load(1, rank=2), 0.0)
    assert only(view, 0.0).running is None
    view.load(load(1), 0.0)
    view.left(CARD)
    assert view.rows(0.0) == []
    view.joined(CARD, 0.0)
    view.load(load(1), 0.0)
    assert only(view, 0.0).running == 2


def test_a_row_tells_for_how_long_its_speed_is_unusual() -> None:
    row = FleetRow(CARD, "ready", [], MeasuredSpeed(0.25, 40.0), 100.0)
    assert (row.speed, row.outlier_s) == (0.25, 60.0)
    usual = FleetRow(CARD, "ready", [], MeasuredSpeed(1.0, None), 100.0)
    assert (usual.speed, usual.outlier_s) == (1.0, None)


def starting(phase: str) -> Starting:
    return Starting(
        instance=CARD.instance, model="demo", engine="mock", phase=phase, since=0.0, started=0.0
    )


def test_a_worker_that_starts_shows_its_phase_until_it_joins() -> None:
    view = FleetView()
    view.starting(starting("weights"), 0.0)
    row = only(view, 1.0)
    assert (row.instance, row.role, row.model) == ("worker-0-1", "worker", "demo")
    assert (row.state, row.running) == ("starting: weights", None)
    view.starting(starting("registration"), 2.0)
    assert only(view, 2.0).state == "starting: registration"
    view.joined(CARD, 3.0)
    view.starting(starting("registration"), 3.0)
    assert only(view, 3.0).state == "ready", "a late message changes nothing"


def test_a_worker_that_stops_starting_is_forgotten() -> None:
    view = FleetView()
    view.starting(starting("weights"), 0.0)
    assert view.rows(SILENT_S) == []
