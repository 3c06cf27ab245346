"""A whole mesh for hours: every service is rolled in turn, and memory stays bounded."""

import asyncio
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from support.growth import Growth, ShortLivedClients, resident
from support.traffic import Traffic, distinct_prompts
from support.up import Up

SOAK_S = float(os.environ.get("SOAK_S", "600"))
SERVICES = ("worker", "router", "frontend", "indexer", "kvbm", "planner")
CLIENTS, VISITORS, TOKENS = 8, 8, 40
WARM = 4  # minutes
BOUND = 2.0  # MiB a minute, of the processes that live as long as the mesh
PEAK = 1.25  # of the second half's highest memory of a service over the first half's
ARGUMENTS = (
    *("--workers", "3", "--max-workers", "3", "--routers", "2", "--indexers", "2", "--kvbm"),
    *(
        "--planner",
        "--planner-pools",
        "workers:min=3,max=3",
        "--mock-kvbm",
        "--mock-blocks",
        "2048",
    ),
    *("--mock-speedup", "4", "--kvbm-host-bytes", str(64 << 20), "--frontend-access-log", "off"),
    *("--streams-kv-bytes", str(4 << 20), "--streams-route-bytes", str(4 << 20)),
    *("--streams-seq-bytes", str(2 << 20), "--frontend-prepare-cache-bytes", str(2 << 20)),
)


async def roll(up: Up, service: str) -> str:
    """Roll a service; returns the output of a roll that has failed, or empty."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "kvmesh.cli.main",
            "fleet",
            "roll",
            service,
            "--watch",
            "2",
            "--afresh",
        ),
        *("--tolerance", "1000", "--nats", up.nats_url, "--nats-token-file", str(up.token_file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return output.decode() if process.returncode else ""


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_every_service_is_rolled_for_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = Up(tmp_path, *ARGUMENTS, "--kvbm-directory", str(tmp_path))
    up.start()
    try:
        await up.ready()
        growth = Growth({"up": up.pid, "nats": up.children()["nats"]})
        peaks: dict[str, list[tuple[float, float]]] = defaultdict(list)
        rolls, failed = dict.fromkeys(SERVICES, 0), list[str]()
        began, stop = time.monotonic(), asyncio.Event()

        async def sample() -> None:
            while not stop.is_set():
                passed = time.monotonic() - began
                growth.sample(passed / 60)
                for name, pid in up.children().items():
                    service = name.rpartition("-")[0]
                    if service in SERVICES:
                        try:
                            peaks[service].append((passed, resident(pid)))
                        except OSError:  # it has ended meanwhile
                            continue
                await asyncio.sleep(2)

        sampling = asyncio.create_task(sample())
        prompts = distinct_prompts(4, CLIENTS)
        async with (
            ShortLivedClients(up.url, VISITORS) as visitors,
            Traffic(up.url, prompts, CLIENTS, TOKENS) as traffic,
        ):
            while time.monotonic() - began < SOAK_S:
                for service in SERVICES:
                    if problem := await roll(up, service):
                        failed.append(f"{service}: {problem}")
                    rolls[service] += 1
        stop.set()
        await sampling
        report = [
            f"\n{traffic.completed + visitors.served} answers in {time.monotonic() - began:.0f} s,"
            f" {len(traffic.failed)} failed or wrong, longest pause {traffic.longest_pause:.1f} s",
            "| service | rolls | highest MiB, first half | second half |",
            "| --- | --- | --- | --- |",
        ]
        for service in SERVICES:
            first, second = _halves(peaks[service], time.monotonic() - began)
            report.append(f"| {service} | {rolls[service]} | {first:.0f} | {second:.0f} |")
        report.append(growth.table(WARM))
        with capsys.disabled():
            print("\n".join(report))
        assert traffic.failed == []
        assert failed == []
        if SOAK_S >= 60 * (WARM + 6):
            assert all(slope <= BOUND for slope in growth.slopes(WARM).values())
            for service in SERVICES:
                first, second = _halves(peaks[service], time.monotonic() - began)
                assert second <= PEAK * first, service
    finally:
        up.close()


def _halves(samples: list[tuple[float, float]], passed: float) -> tuple[float, float]:
    first = max((size for at, size in samples if at < passed / 2), default=0.0)
    return first, max((size for at, size in samples if at >= passed / 2), default=0.0)
