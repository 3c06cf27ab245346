"""Planner processes beside a scripted operator: who decides, what survives, what is refused."""

import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.frontend import MODEL, scripted_worker
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.places.on_bus import BusPlace
from support.planners import Planners, command
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Candidate, Decision, encode
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.planner.connectors.bucket import BucketConnector

EAST = 'pool="east"'
PROGRAM = """#!{python}
import sys, time
from pathlib import Path
folder = Path(__file__).parent
mode = (folder / "mode").read_text()
if mode == "hang":
    time.sleep(3600)
if mode == "fail" or (mode == "full" and sys.argv[1] == "scale"):
    sys.exit("the rack is on fire")
if sys.argv[1] == "scale":
    (folder / "east").write_text(sys.argv[2].removeprefix("east="))
else:
    print('{{"east": %s}}' % (folder / "east").read_text())
"""


@pytest_asyncio.fixture
async def planners(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits, tmp_path: Path
) -> AsyncIterator[Planners]:
    mesh = Mesh(nats_server.url, tmp_path, stream_env(limits), bus.options.namespace)
    yield Planners(mesh, bus)
    for process in mesh.processes.values():
        process.send_signal(signal.SIGCONT)
    mesh.stop()


@pytest_asyncio.fixture
async def place(bus: Bus, limits: StreamLimits) -> AsyncIterator[BusPlace]:
    """An operator of the pool `east`, with a worker of the demo model."""
    place = BusPlace(bus)
    await place.start()
    async with scripted_worker(bus, limits, "worker-0"):
        yield place
    await place.close()


def wanted(planners: Planners, name: str = "planner-0") -> float:
    samples = planners.metrics(name).items()
    return next((v for s, v in samples if "_wanted_workers" in s and EAST in s), -1)


async def set_least(planners: Planners, least: int) -> None:
    status, output = await command(planners.mesh, "plan", "set", f"pools=east:min={least},max=6")
    assert (status, output.strip()) == (0, f"pools = east:min={least},max=6")


async def runs(place: BusPlace, number: int, timeout: float = PATIENCE_S) -> None:
    async def equal() -> bool:
        return len(await place.running("east")) == number

    await eventually(equal, timeout, f"{number} workers of pool east")


async def route(bus: Bus, count: int, model: str = MODEL) -> None:
    """Store decisions of a router, as if requests had arrived now."""
    rank = Candidate(
        instance="w", worker="w", rank=0, overlap=[0, 0, 0, 0], prefill=1, decode=1, requests=1,
        cost=1,
    )  # fmt: skip
    for number in range(count):
        decision = Decision(
            request=f"{model}-{number}",
            model=model,
            time=time.time(),
            router="router-1",
            policy="kv",
            chosen=rank,
            candidates=[rank],
            tokens=640,
            sequence_hashes=b"",
            max_tokens=9,
            block_size=16,
        )
        await bus.store(bus.subjects.route(model), encode(decision), PATIENCE_S)


# leadership


async def test_the_oldest_planner_decides_and_another_takes_over(
    planners: Planners, place: BusPlace
) -> None:
    await planners.start("planner-0")
    await planners.start("planner-1")
    await planners.decides()
    assert planners.leads("planner-0")
    await set_least(planners, 2)
    await runs(place, 2)
    assert not planners.leads("planner-1")
    assert planners.decided("planner-1") == 0
    changes = place.changes
    planners.mesh.kill("planner-0")
    await eventually(lambda: planners.leads("planner-1"), what="planner-1 takes over")
    await planners.decides(3, "planner-1")
    assert place.changes == changes
    await set_least(planners, 3)
    await runs(place, 3)
    assert {d.planner.rpartition("-")[0] for d in await planners.decisions()} == {
        "planner-0",
        "planner-1",
    }
    await planners.start("planner-0")
    await planners.decides(3, "planner-1")
    assert not planners.leads("planner-0")
    planners.mesh.kill("planner-1", signal.SIGTERM)
    await eventually(lambda: planners.leads("planner-0"), what="a clean exit ends the lease")
    await set_least(planners, 4)
    await runs(place, 4)


@pytest.mark.parametrize("lease_s", [4.0])
async def test_a_frozen_planner_does_not_lead_again(planners: Planners, place: BusPlace) -> None:
    await planners.start("planner-0")
    await planners.start("planner-1")
    await planners.decides()
    planners.freeze("planner-0")
    await eventually(lambda: planners.leads("planner-1"), what="planner-1 takes over")
    await set_least(planners, 2)
    await runs(place, 2)
    planners.thaw("planner-0")
    await eventually(lambda: "the lease had ended" in planners.log("planner-0"))
    await planners.decides(3, "planner-1")
    assert not planners.leads("planner-0")
    await set_least(planners, 3)
    await runs(place, 3)
    planners.mesh.kill("planner-1", signal.SIGTERM)
    await eventually(lambda: planners.leads("planner-0"), what="the thawed one leads again")
    await set_least(planners, 4)
    await runs(place, 4)
    # the changes of the other planner are not taken for changes by hand
    assert "by hand" not in planners.log("planner-0") + planners.log("planner-1")


# state


async def test_a_restarted_planner_goes_on(planners: Planners, place: BusPlace, bus: Bus) -> None:
    await planners.start(KVMESH_PLANNER_DOWN_COOLDOWN_S="600")
    await set_least(planners, 4)
    await runs(place, 4)
    await route(bus, 12)
    await set_least(planners, 1)
    changes, names = place.changes, await place.running("east")
    planners.mesh.kill("planner-0")
    await planners.start(KVMESH_PLANNER_DOWN_COOLDOWN_S="600")
    await eventually(lambda: planners.leads(), what="the lease of the killed one ends")
    await planners.decides(3)
    assert wanted(planners) == 4
    assert await place.running("east") == names
    assert place.changes == changes
    last = (await planners.decisions())[-1]
    assert last.signals["prompt_tokens"] == 640
    assert "by hand" not in planners.log()


async def test_a_change_by_hand_is_respected_for_a_while(
    planners: Planners, place: BusPlace, bus: Bus
) -> None:
    await planners.start(KVMESH_PLANNER_MANUAL_HOLD_S="4")
    await set_least(planners, 2)
    await runs(place, 2)
    await eventually(lambda: wanted(planners) == 2)
    await BucketConnector(bus, PATIENCE_S).scale({"east": 1})
    await eventually(
        lambda: "pool east was set to 1 by hand; it stays so for 4 s" in planners.log()
    )
    await runs(place, 2)  # again, as the least size demands
    assert planners.log().count("by hand;") == 1
    reasons = [decision.reason for decision in await planners.decisions()]
    assert any("east 1 → 2" in reason for reason in reasons)


async def test_a_planner_outlives_its_nats_server(
    planners: Planners, place: BusPlace, nats_server: NatsServer
) -> None:
    await planners.start(KVMESH_PLANNER_CONNECTOR_TIMEOUT_S="2")
    await planners.decides()
    nats_server.kill()
    await eventually(lambda: "cannot change the fleet" in planners.warnings())
    nats_server.start()
    await eventually(lambda: not planners.warnings(), what="the warnings end")
    await set_least(planners, 3)
    await runs(place, 3)
    await eventually(lambda: wanted(planners) == 3)
    assert "by hand" not in planners.log()
    assert "Traceback" not in planners.log()


# settings


async def test_settings_change_at_run_time_and_survive_restarts(
    planners: Planners, place: BusPlace
) -> None:
    mesh = planners.mesh
    await planners.start()
    await planners.decides()
    status, output = await command(
        mesh, "plan", "set", "ttft=p95=1s,batch:p90=1m", "max_devices=3", "pools=east:min=2,max=3"
    )
    assert status == 0, output
    assert output.splitlines() == [
        "ttft = p95=1s,batch:p90=1m",
        "max_devices = 3",
        "pools = east:min=2,max=3",
    ]
    await runs(place, 2)
    text = "set at run time: ttft=p95=1s,batch:p90=1m max_devices=3 pools=east:min=2,max=3"
    assert text in planners.log()
    status, output = await command(mesh, "plan", "set", "target=throughput", "ttft=")
    assert (status, "ttft" in output, "max_devices = 3" in output) == (0, False, True)
    await eventually(lambda: "target=throughput" in planners.log())
    planners.mesh.kill("planner-0", signal.SIGTERM)
    await planners.start()
    await eventually(lambda: planners.log().count("target=throughput") == 2)
    assert (await command(mesh, "plan", "set", "--reset"))[0] == 0
    assert await command(mesh, "plan", "set") == (0, "the planners' own settings apply\n")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["speed=1"], "'speed=1': expected KEY=VALUE; the keys are pools, max_devices, ttft"),
        (["ttft"], "expected KEY=VALUE"),
        (["interval_s=1"], "expected KEY=VALUE"),
        (["ttft=p95=soon"], "ttft 'p95=soon': expected"),
        (["ttft=p100=1s"], "a quantile lies between"),
        (["ttft=p95=2s,p99=1s"], "a higher quantile cannot be promised a shorter time"),
        (["max_devices=0"], "planner.max_devices"),
        (["max_devices=2", "pools=east:min=3"], "below the 3 devices of the pools' minimums"),
        (["pools=east:min=3,max=2"], "min 3 exceeds max 2"),
        (["pools=east:serves=prefill"], "at least one pool must decode"),
        (["down_cooldown_s=nan"], "planner.down_cooldown_s"),
        (["--reset", "max_devices=2"], "--reset excludes new values"),
    ],
)
async def test_invalid_settings_are_refused(
    planners: Planners, changes: list[str], reason: str
) -> None:
    status, output = await command(planners.mesh, "plan", "set", *changes)
    assert status == 2
    assert reason in output
    assert len(output.splitlines()) == 1
    assert not await read_bucket(planners.bus, planners.bus.subjects.plan_bucket, "settings")


async def test_settings_that_contradict_earlier_ones_are_refused(planners: Planners) -> None:
    assert (await command(planners.mesh, "plan", "set", "pools=east:min=3"))[0] == 0
    status, output = await command(planners.mesh, "plan", "set", "max_devices=2")
    assert (status, "below the 3 devices" in output) == (2, True)
    assert await command(planners.mesh, "plan", "set") == (0, "pools = east:min=3\n")


def warned(planners: Planners, reason: str) -> bool:
    return reason in planners.warnings()


async def test_a_planner_ignores_what_contradicts_its_own_settings(
    planners: Planners, place: BusPlace
) -> None:
    await planners.start()
    for changes, reason in (
        (["pools=west:min=3"], "pools are not added or removed at run time; they are east"),
        (["pools=east:model=other"], "pool east: model stays empty at run time, not other"),
    ):
        assert (await command(planners.mesh, "plan", "set", *changes))[0] == 0
        await eventually(partial(warned, planners, reason))
        await command(planners.mesh, "plan", "set", "--reset")
        await eventually(lambda: not planners.warnings())
    bucket = await planners.bus.js.key_value(planners.bus.subjects.plan_bucket)
    for data in (b"\xc1", b"[]", b'{"ttft":3}', b'{"name":"x"}'):
        await bucket.put(planners.bus.subjects.plan_settings_key, data)
        await eventually(lambda: "ignored what was set: " in planners.warnings())
        await bucket.delete(planners.bus.subjects.plan_settings_key)
        await eventually(lambda: not planners.warnings())
    await planners.decides()


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"TTFT": "p95=2s,p99=1s"}, "a higher quantile cannot be promised a shorter time"),
        ({"TTFT": "fast"}, "ttft 'fast': expected"),
        ({"MAX_DEVICES": "2", "POOLS": "east:min=2,devices=2"}, "planner.max_devices 2 is below"),
        ({"PREDICTOR": "oracle"}, "planner.predictor: "),
        ({"POOLS": "east:serves=prefill"}, "planner.pools: at least one pool must decode"),
        ({"POOLS": "east:size=2"}, "planner.pools: pool east: unknown key size"),
        ({"POOLS": "east,east"}, "planner.pools: pool east: is given twice"),
        ({"CONNECTOR": "command"}, "planner.command"),
        ({"CONNECTOR": "compose"}, "planner.compose_file"),
        ({"CONNECTOR": "magic"}, "planner.connector"),
        ({"INTERVAL_S": "0"}, "planner.interval_s"),
    ],
)
async def test_a_planner_with_invalid_settings_ends_with_status_2(
    planners: Planners, env: dict[str, str], reason: str
) -> None:
    process = planners.launch(**{f"KVMESH_PLANNER_{key}": value for key, value in env.items()})
    await eventually(lambda: process.poll() is not None, what="it ends")
    log = planners.log()
    assert process.returncode == 2, log
    assert reason in log or reason.replace("planner.", "KVMESH_PLANNER_").upper() in log.upper()
    assert "Traceback" not in log


@pytest.mark.parametrize("role", ["planner", "router"])
async def test_wrong_settings_are_refused_without_nats(role: str, tmp_path: Path) -> None:
    mesh = Mesh("nats://127.0.0.1:1", tmp_path, {})
    wrong = {"KVMESH_PLANNER_POOLS": "w:min=3,max=2", "KVMESH_ROUTER_POLICY": "none"}
    mesh.start(role, role, **wrong)
    await eventually(lambda: mesh.processes[role].poll() is not None, what="it ends")
    assert mesh.processes[role].returncode == 2
    log = (tmp_path / f"{role}.log").read_text()
    assert ("min 3 exceeds max 2" if role == "planner" else "none") in log


# connectors


async def test_an_advisory_planner_changes_nothing(
    planners: Planners, place: BusPlace, bus: Bus
) -> None:
    await planners.start(
        KVMESH_PLANNER_CONNECTOR="advisory",
        KVMESH_PLANNER_POOLS="east:min=3,max=6",
        KVMESH_PLANNER_STARTUP_S="0.5",
    )
    await eventually(lambda: "would run 3 workers of pool east" in planners.log())
    await planners.decides(15)  # longer than a worker's start may take
    samples = planners.metrics()
    assert not any(value for name, value in samples.items() if "failed_starts" in name)
    assert wanted(planners) == 3
    changed = [decision for decision in await planners.decisions() if decision.changed]
    assert [(d.connector, d.pools["east"].before, d.pools["east"].wanted) for d in changed] == [
        ("advisory", 1, 3)
    ]
    assert planners.log().count("would run") == 1
    assert place.changes == 0
    assert not await read_bucket(bus, bus.subjects.plan_bucket, "desired")
    assert not planners.warnings()


@pytest.mark.parametrize("mode", ["fail", "full", "hang"])
async def test_a_failing_connector_is_a_warning_until_it_recovers(
    planners: Planners, place: BusPlace, tmp_path: Path, mode: str
) -> None:
    program = tmp_path / "fleet"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "east").write_text("1")
    (tmp_path / "mode").write_text(mode)
    await planners.start(
        KVMESH_PLANNER_CONNECTOR="command",
        KVMESH_PLANNER_COMMAND=str(program),
        KVMESH_PLANNER_CONNECTOR_TIMEOUT_S="0.5" if mode == "hang" else "30",
        KVMESH_PLANNER_POOLS="east:min=2,max=6",
    )
    reason = "did not end within 0.5 s" if mode == "hang" else "the rack is on fire"
    await eventually(lambda: reason in planners.warnings())
    await planners.decides(3)
    status, output = await command(planners.mesh, "status")
    assert status == 0
    assert reason in output
    assert planners.log().count("cannot change the fleet") == 1
    assert planners.decided() >= 3
    changed = [decision for decision in await planners.decisions() if decision.changed]
    assert len(changed) == 1  # it tries again, without a new decision
    (tmp_path / "mode").write_text("well")
    if mode == "hang":
        planners.mesh.kill("planner-0", signal.SIGTERM)  # while a program may hang
        await planners.start(
            KVMESH_PLANNER_CONNECTOR="command",
            KVMESH_PLANNER_COMMAND=str(program),
            KVMESH_PLANNER_POOLS="east:min=2,max=6",
        )
    await eventually(lambda: (tmp_path / "east").read_text() == "2")
    await eventually(lambda: not planners.warnings())
    await eventually(lambda: wanted(planners) == 2)
    assert "by hand" not in planners.log()
    assert "Traceback" not in planners.log()


async def test_a_planner_waits_for_an_operator(planners: Planners, bus: Bus) -> None:
    await planners.start(KVMESH_PLANNER_CONNECTOR_TIMEOUT_S="0.5")
    await eventually(lambda: "no operator has written a report" in planners.warnings())
    place = BusPlace(bus)
    await place.start()
    await eventually(lambda: not planners.warnings())
    await place.close()


# workers and models


async def test_unreadable_entries_and_messages_are_ignored(
    planners: Planners, place: BusPlace, bus: Bus
) -> None:
    bucket = await bus.js.key_value(bus.subjects.plan_bucket)
    await bucket.put(bus.subjects.idle_key("broken"), b"\xc1")
    for subject in (bus.subjects.route(MODEL), bus.subjects.seq(MODEL)):
        await bus.store(subject, b"\xc1", PATIENCE_S)
    await planners.start()
    await planners.decides()
    log = planners.log()
    assert "ignored the unreadable idle model" in log
    assert "ignored a malformed decision" in log
    assert "ignored malformed active sequences" in log


async def test_an_entry_of_an_idle_model_is_removed_when_its_pool_keeps_workers(
    planners: Planners, place: BusPlace, bus: Bus
) -> None:
    await planners.start(KVMESH_PLANNER_POOLS="east:min=0,max=6")
    key = bus.subjects.idle_key(MODEL)

    async def listed() -> bool:
        return key in await read_bucket(bus, bus.subjects.plan_bucket, "idle.*")

    async def removed() -> bool:
        return not await listed()

    await eventually(listed)
    planners.mesh.kill("planner-0")
    await planners.start(KVMESH_PLANNER_POOLS="east:min=1,max=6")
    await eventually(removed)


# views


async def test_metrics_status_and_tail_show_the_planner(
    planners: Planners, place: BusPlace
) -> None:
    await planners.start(KVMESH_PLANNER_POOLS="east:min=2,max=6", KVMESH_PLANNER_TTFT="p95=1s")
    await runs(place, 2)
    await planners.decides()
    samples = planners.metrics()
    names = {name.partition("{")[0].removeprefix("kvmesh_planner_") for name in samples}
    assert names >= {
        *("leader", "decisions_total", "ready_workers", "starting_workers", "wanted_workers"),
        *("startup_seconds", "failed_starts", "arrivals_per_second", "forecast_per_second"),
        "connector_errors_total",
    }
    status, output = await command(planners.mesh, "status")
    assert (status, "planner-0" in output) == (0, True), output
    arguments = ("tail", "scaling", "--since", "1h", "--no-follow")

    status, output = await command(planners.mesh, *arguments)
    assert status == 0, output
    first = next(line for line in output.splitlines() if "east 1→2" in line)
    assert f"{MODEL} east 1→2  arrivals 0.00/s, forecast 0.00/s  0 waiting" in first
    status, output = await command(planners.mesh, *arguments, "--json")
    kinds = {json.loads(line)["message"]["type"] for line in output.splitlines() if line[:1] == "{"}
    assert kinds == {"ScalingDecision"}
