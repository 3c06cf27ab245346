"""Traces of requests over real processes: complete in every topology; failed requests are kept."""

import asyncio
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.collector import Collector, ReceivedSpan
from support.mesh import Mesh, scrape, stream_env
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Clear, ControlReply, MessageDecoder
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.tracing import names

LONG = "Each worker tells what it keeps, and a prompt goes where most of it is kept already. " * 8
CLIENT_SPAN = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = "01", "00"
OF_EVERY_REQUEST = {
    *(names.RECEIVE, names.RENDER, names.TOKENIZE, names.ROUTE, names.PLACE, names.INDEX),
    *(names.OVERLAPS, names.ATTEMPT, names.OFFER),
    *(names.ENGINE_QUEUE, names.ENGINE_PREFILL, names.ENGINE_DECODE),
}


@pytest_asyncio.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    runner = await collector.serve()
    yield collector
    await runner.cleanup()


@pytest_asyncio.fixture
async def mesh(
    nats_server: NatsServer, tmp_path: Path, collector: Collector, limits: StreamLimits
) -> AsyncIterator[Mesh]:
    # the server has no room for the default limits of a mesh for each test
    env = {"KVMESH_MOCK_SPEEDUP": "5", **stream_env(limits), **collector.env}
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    await asyncio.to_thread(mesh.stop)  # processes send their last spans to the collector


def trace_id(number: int) -> str:
    return f"{number:032x}"


async def complete(
    mesh: Mesh, number: int, prompt: str = LONG, flags: str = SAMPLED, **fields: Any
) -> Any:
    """The answer to a prompt whose client sends a `traceparent`; None if it fails."""
    body = {"model": "kvmesh-demo", "prompt": prompt, "max_tokens": 12, **fields}
    return await post(mesh, "/v1/completions", body, f"00-{trace_id(number)}-{CLIENT_SPAN}-{flags}")


async def post(mesh: Mesh, path: str, body: dict[str, Any], parent: str) -> Any:
    """The response, or None for an error."""

    def send() -> Any:
        request = urllib.request.Request(
            f"{mesh.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "traceparent": parent},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            return None

    return await asyncio.to_thread(send)


async def arrived(collector: Collector, number: int, *wanted: str) -> list[ReceivedSpan]:
    """The spans of a trace once those with the `wanted` names are among them, and no orphan."""

    def spans() -> list[ReceivedSpan]:
        found = collector.traces().get(trace_id(number), [])
        have = {span.name for span in found}
        assert {*wanted, names.REQUEST} <= have, f"missing {set(wanted) - have}"
        lost = [s.name for s in collector.orphans() if s.parent != CLIENT_SPAN]
        assert lost == []
        return found

    found = await eventually(spans)
    (root,) = (span for span in found if span.name == names.REQUEST)
    outside = [s for s in found if s.start < root.start - 0.01 and s is not root]
    assert outside == []
    return found


def ready_workers(mesh: Mesh, count: int) -> bool:
    return mesh.live_workers() == count


async def test_every_request_is_one_trace_and_failed_ones_are_kept(
    mesh: Mesh, collector: Collector
) -> None:
    mesh.env |= {"KVMESH_TRACING_TAIL": "true", "KVMESH_TRACING_SLOW_S": "3600"}
    mesh.env |= {"KVMESH_FRONTEND_RESTART_WAIT_S": "0.1", "KVMESH_MOCK_SPEEDUP": "1"}
    mesh.start_all(workers=2)
    await mesh.ready()
    await eventually(lambda: ready_workers(mesh, 2))

    await complete(mesh, 1, flags=UNSAMPLED)  # neither slow nor failed: never exported
    await complete(mesh, 2, n=2)
    spans = await arrived(collector, 2, *OF_EVERY_REQUEST - {names.INDEX, names.OVERLAPS})
    (root,) = (span for span in spans if span.name == names.REQUEST)
    assert root.parent == CLIENT_SPAN
    assert root.attributes[names.CHOICES] == 2
    assert root.attributes[names.OUTPUT_TOKENS] == 24
    await eventually(lambda: len(collector.named(names.ENGINE_DECODE)) == 2)
    attempts = [s for s in collector.named(names.ATTEMPT) if s.trace == trace_id(2)]
    assert {a.attributes[names.CHOICE] for a in attempts} == {0, 1}
    assert all(a.events == [names.FIRST_TOKEN] for a in attempts)

    running = asyncio.create_task(complete(mesh, 3, prompt="Go on. ", max_tokens=400))

    def first_attempt() -> str:
        samples = mesh.worker_metrics().items()
        busy = [k for k, v in samples if "worker_running_requests{" in k and v]
        return next(
            name for name in ("worker-0", "worker-1") if any(f'"{name}"' in k for k in busy)
        )

    victim = await eventually(lambda: _attempt(first_attempt))
    mesh.kill(victim)
    answer = await running
    assert answer["usage"]["completion_tokens"] == 400
    spans = await arrived(collector, 3, names.MIGRATION, names.ENGINE_DECODE)
    (migration,) = (span for span in spans if span.name == names.MIGRATION)
    assert any(s.name == names.ROUTE and s.parent == migration.id for s in spans)
    attempts = sorted((s for s in spans if s.name == names.ATTEMPT), key=lambda s: s.start)
    assert [a.failed for a in attempts] == [True, False]
    assert f"trace_id={trace_id(3)}" in mesh.logs()

    (left,) = {"worker-0", "worker-1"} - {victim}
    mesh.kill(left)
    assert await complete(mesh, 4, flags=UNSAMPLED) is None
    spans = await arrived(collector, 4, names.ROUTE, names.PLACE)
    (root,) = (span for span in spans if span.name == names.REQUEST)
    assert root.failed
    assert root.parent == ""  # the client's span is exported by nobody
    assert {span.service for span in spans} >= {"kvmesh-frontend", "kvmesh-router"}
    assert trace_id(1) not in collector.traces()


def instance(mesh: Mesh, worker: str) -> str:
    return str(re.findall(f" as ({worker}-[0-9a-f]+)$", mesh.logs(), re.MULTILINE)[-1])


def _attempt(function: Any) -> str:
    try:
        return str(function())
    except StopIteration:
        return ""


async def test_hand_offs_and_blocks_of_lower_tiers_are_parts_of_the_trace(
    mesh: Mesh, collector: Collector, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
    from kvmesh.worker.models.tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "tiny")
    mesh.env |= {
        "KVMESH_ROUTER_DISAGG_TOKENS": "100",
        "KVMESH_WORKER_ENGINE": "torch",
        "KVMESH_WORKER_MODEL": str(tmp_path / "tiny"),
        "KVMESH_TORCH_THREADS": "1",
        "KVMESH_TORCH_BLOCKS": "256",
        "KVMESH_KVBM_DIRECTORY": str(tmp_path / "node"),
        "KVMESH_KVBM_HOST_BYTES": str(32 << 20),
    }
    mesh.start("kvbm", "kvbm-0")
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    mesh.start("worker", "prefill-0", KVMESH_WORKER_SERVES="prefill")
    mesh.start("worker", "decode-0", KVMESH_WORKER_SERVES="decode")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    await eventually(lambda: ready_workers(mesh, 2))
    await complete(mesh, 1, model="tiny")
    spans = await arrived(
        collector,
        1,
        *(names.REMOTE_PREFILL, names.HANDOFF, names.OFFLOAD, names.KVBM_OFFER),
        *(names.ATTEMPT, names.ENGINE_DECODE),
    )
    (prefill,) = (span for span in spans if span.name == names.REMOTE_PREFILL)
    below = {span.name for span in spans if span.parent == prefill.id}
    assert {names.OFFER, names.ENGINE_QUEUE, names.ENGINE_PREFILL, names.OFFLOAD} <= below

    bus = await Bus.connect(mesh.options, "test")
    for worker in ("prefill-0", "decode-0"):
        subject, reply = (
            bus.subjects.ctl(instance(mesh, worker)),
            MessageDecoder(ControlReply),
        )
        assert (await bus.request(subject, Clear(tiers=[0]), reply, PATIENCE_S)).ok
    await bus.close()
    await complete(mesh, 2, model="tiny")
    spans = await arrived(collector, 2, names.ONBOARD, names.KVBM_FETCH)
    onboarded = [span for span in spans if span.name == names.ONBOARD]
    assert any(sum(span.attributes[names.TIERS][1:]) > 100 for span in onboarded)


async def test_blocks_that_nodes_share_are_parts_of_the_trace(
    mesh: Mesh, collector: Collector, tmp_path: Path
) -> None:
    """The kvbm in the west has that in the east load blocks from its disk, and borrows them."""
    pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
    from kvmesh.worker.models.tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "tiny")
    port = free_port()
    mesh.env |= {
        "KVMESH_WORKER_ENGINE": "torch",
        "KVMESH_WORKER_MODEL": str(tmp_path / "tiny"),
        "KVMESH_TORCH_THREADS": "1",
        "KVMESH_TORCH_BLOCKS": "256",
        "KVMESH_KVBM_HOST_BYTES": str(32 << 20),
        "KVMESH_KVBM_PEERS": "true",
        "KVMESH_TRANSFER_VIA": "tcp",
    }
    disk = {
        "KVMESH_KVBM_DISK_PATH": str(tmp_path / "disk"),
        "KVMESH_KVBM_DISK_BYTES": str(32 << 20),
        "KVMESH_KVBM_DISK_FREE_BYTES": "0",
        "KVMESH_KVBM_DISK_FREQUENCY": "1",
        "KVMESH_KVBM_METRICS_PORT": str(port),
    }
    for node, more in (("east", disk), ("west", {})):
        folder = {"KVMESH_KVBM_DIRECTORY": str(tmp_path / node), "KVMESH_KVBM_NODE": node}
        mesh.start("kvbm", f"kvbm-{node}", **folder, **more)
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    mesh.start("worker", "worker-east", KVMESH_WORKER_NODE="east")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    await complete(mesh, 1, model="tiny")
    await arrived(collector, 1, names.OFFLOAD, names.KVBM_OFFER)
    mesh.start("worker", "worker-west", KVMESH_WORKER_NODE="west")
    await eventually(lambda: ready_workers(mesh, 2))
    mesh.kill("worker-east", signal.SIGTERM)
    await eventually(lambda: ready_workers(mesh, 1))

    def in_the_east(sample: str) -> float:
        return scrape(port)[f"kvmesh_kvbm_{sample}"]

    def is_on_disk() -> bool:
        return 0 < in_the_east('blocks{tier="1"}') == in_the_east('blocks{tier="2"}')

    await eventually(is_on_disk, what="the disk has all blocks")
    bus = await Bus.connect(mesh.options, "test")
    cards = Directory(bus, StreamLimits())
    await cards.open()

    async def clear(process: str, *tiers: int) -> None:
        (card,) = (card for card in cards.instances if card.name == process)
        replies = MessageDecoder(ControlReply)
        subject = bus.subjects.ctl(card.instance)
        assert (await bus.request(subject, Clear(tiers=list(tiers)), replies, PATIENCE_S)).ok

    numbers = count(2)

    async def borrowing() -> int:
        """The number of a request whose blocks were borrowed, once the nodes know each other."""
        number = next(numbers)
        await clear("kvbm-east", 1)
        await clear("kvbm-west")
        await clear("worker-west", 0)
        await complete(mesh, number, model="tiny")
        return number if in_the_east("lent_blocks_total") else 0

    number = await eventually(borrowing, what="blocks are lent")
    await cards.close()
    await bus.close()
    wanted = (names.KVBM_FETCH, names.KVBM_PREPARE, names.KVBM_LEND, names.ONBOARD)
    spans = await arrived(collector, number, *wanted)
    (attempt,) = (span for span in spans if span.name == names.ATTEMPT)
    shared = [span for span in spans if span.name in (names.KVBM_PREPARE, names.KVBM_LEND)]
    assert {span.parent for span in shared} == {attempt.id}
    assert {span.service for span in shared} == {"kvmesh-kvbm"}
    moved = {span.name for span in shared if span.attributes[names.BLOCKS]}
    assert moved == {names.KVBM_PREPARE, names.KVBM_LEND}


async def test_a_speculative_prefill_is_a_trace_of_its_own(
    mesh: Mesh, collector: Collector, tmp_path: Path
) -> None:
    script = tmp_path / "script.jsonl"
    text = f"<think>\n{'One has to read it first. ' * 6}\n</think>\n\n{'Here it is. ' * 20}"
    script.write_text(json.dumps({"match": "Think first", "text": text}))
    mesh.env |= {"KVMESH_MOCK_SCRIPT": str(script), "KVMESH_MOCK_SPEEDUP": "50"}
    mesh.env["KVMESH_FRONTEND_ANSWERS_BYTES"] = "0"  # the prompt would have the answer as it is
    mesh.start_all(workers=1)
    await mesh.ready()
    messages = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes?"}]
    messages.append({"role": "user", "content": "Think first."})
    nvext = {
        "agent_hints": {"speculative_prefill": True},
        "agent_context": {"session_id": "run", "trajectory_id": "run:main"},
    }
    body = {"model": "kvmesh-demo", "messages": messages, "max_tokens": 900, "nvext": nvext}
    parent = f"00-{trace_id(1)}-{CLIENT_SPAN}-{SAMPLED}"
    assert await post(mesh, "/v1/chat/completions", body, parent)
    await eventually(lambda: collector.named(names.PREFETCH), what="the prefetch is traced")
    (speculation,) = await eventually(lambda: collector.named(names.SPECULATIVE_PREFILL))
    (prefetch,) = collector.named(names.PREFETCH)
    assert (speculation.parent, speculation.links) == ("", [trace_id(1)])
    assert (prefetch.trace, prefetch.parent) == (speculation.trace, speculation.id)
    spans = await arrived(collector, 1, names.RENDER)
    (root,) = (span for span in spans if span.name == names.REQUEST)
    assert root.attributes[names.SESSION] == "run:main"

    async def shown() -> str:
        return (await mesh.command("explain", "trace", "run:main")).stdout

    table = await eventually(shown, what="the session's turn is listed")
    assert root.attributes[names.REQUEST_ID] in table
    file = tmp_path / "timeline.json"
    assert (
        await mesh.command("explain", "trace", "run:main", "--perfetto", str(file))
    ).returncode == 0
    assert "turn 1" in [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert (await mesh.command("explain", "trace", "nobody")).returncode == 1


async def test_a_collector_that_fails_is_logged_once_and_costs_no_request(
    mesh: Mesh, collector: Collector
) -> None:
    collector.status = 400
    mesh.start_all(workers=1)
    await mesh.ready()
    for number in range(3):
        assert await complete(mesh, number + 1)
    await eventually(lambda: "spans are lost" in (mesh.folder / "frontend-0.log").read_text())
    collector.status = 200

    async def recovers() -> bool:
        assert await complete(mesh, 9)
        return bool(collector.named(names.REQUEST))

    await eventually(recovers)
    log = (mesh.folder / "frontend-0.log").read_text()
    assert log.count("spans are lost") == 1
    assert "400" in log
    await eventually(lambda: "works again" in (mesh.folder / "frontend-0.log").read_text())


async def test_a_start_is_a_trace_that_is_never_sampled_out(
    mesh: Mesh, collector: Collector
) -> None:
    mesh.env |= {"KVMESH_TRACING_SAMPLE_RATIO": "0", "KVMESH_MOCK_STARTUP_S": "0.3"}
    mesh.start_all(workers=1)
    await mesh.ready()
    (start,) = await eventually(lambda: collector.named(names.START))
    spans = await eventually(lambda: _children(collector, start))
    assert {span.service for span in spans} == {"kvmesh-worker"}
    assert start.attributes[names.ENGINE] == "mock"
    assert start.attributes[names.INSTANCE].startswith("worker-0-")
    assert not start.failed
    order = [span.name for span in sorted(spans, key=lambda span: span.start)]
    steps = ("imports", "registration", "configuration", "weights")
    firsts = [order.index(f"start_{phase}") for phase in steps]
    assert firsts == sorted(firsts), order
    assert order[-2:] == ["start_registration", "start_routable"]
    (weights,) = (span for span in spans if span.name == "start_weights")
    assert weights.end - weights.start == pytest.approx(0.3, abs=0.2)
    assert start.start <= min(span.start for span in spans) + 0.01
    assert max(span.end for span in spans) <= start.end + 0.01


async def test_a_failed_start_is_a_failed_trace(mesh: Mesh, collector: Collector) -> None:
    mesh.env |= {"KVMESH_MOCK_KVBM": "true", "KVMESH_MOCK_HOST_BLOCKS": "1"}
    mesh.start("worker", "worker-0")
    (start,) = await eventually(lambda: collector.named(names.START))
    assert start.failed
    assert start.attributes[names.MODEL] == "kvmesh-demo"


def _children(collector: Collector, parent: ReceivedSpan) -> list[ReceivedSpan]:
    """The spans of a start once the last one is among them."""
    found = [span for span in collector.traces()[parent.trace] if span.parent == parent.id]
    assert "start_routable" in {span.name for span in found}
    return found
