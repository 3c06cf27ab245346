"""Memory of processes over time, and a steady load of short-lived clients.

The measure of a process is its minimum in each minute, the memory that the process needs. Go's
garbage collector varies the memory of a NATS server by a third within a minute, so a line through
all samples of a few minutes rises or falls by chance.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path

import aiohttp

MIB = 1 << 20
PAGE = 4096
MODEL = "kvmesh-demo"


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MIB


class Growth:
    """Samples of each process's memory: (minute, MiB)."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}

    def sample(self, minute: float) -> None:
        for name, pid in self._pids.items():
            self.samples[name].append((minute, resident(pid)))

    def slopes(self, since: int) -> dict[str, float]:
        """MiB per minute of each process from minute `since` on, by least squares."""
        return {name: _slope(_minima(samples, since)) for name, samples in self.samples.items()}

    def table(self, since: int) -> str:
        """The measurements, one line per process."""
        slopes = self.slopes(since)
        return "\n".join(
            f"{name:12} {samples[0][1]:6.1f} MiB at first; minimum of each minute from {since} on: "
            f"{' '.join(f'{low:.1f}' for _, low in _minima(samples, since))}; "
            f"{slopes[name]:+.2f} MiB a minute"
            for name, samples in self.samples.items()
        )


def _minima(samples: list[tuple[float, float]], since: int) -> list[tuple[float, float]]:
    """The minimum of each whole minute."""
    lows: dict[int, float] = {}
    for minute, size in samples:
        lows[int(minute)] = min(size, lows.get(int(minute), size))
    whole = round(samples[-1][0])
    return [(minute, low) for minute, low in lows.items() if since <= minute < whole]


def _slope(samples: list[tuple[float, float]]) -> float:
    count = len(samples)
    mean_x = sum(x for x, _ in samples) / count
    mean_y = sum(y for _, y in samples) / count
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


class ShortLivedClients:
    """Clients of one mesh; each sends a few requests and is then replaced by another."""

    def __init__(self, url: str, count: int, seed: int = 0) -> None:
        self._url = url
        self._count = count
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self.served = 0
        self.abandoned = 0

    async def __aenter__(self) -> "ShortLivedClients":
        self._tasks = [asyncio.create_task(self._run_client()) for _ in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_client(self) -> None:
        while True:
            async with aiohttp.ClientSession() as session:
                for _ in range(self._random.randint(1, 6)):
                    await self._request(session)

    async def _request(self, session: aiohttp.ClientSession) -> None:
        chance = self._random
        family, number = chance.randrange(40), chance.randrange(1 << 30)
        body = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": f"You are helper {family}. " * 40},
                {"role": "user", "content": f"Question {number}: what is next?"},
            ],
            "max_tokens": chance.choice([1, 4, 16]),
            "stream": chance.random() < 0.7,
        }
        data = json.dumps(body)
        headers = {"Content-Type": "application/json", "x-session-id": f"s{chance.randrange(500)}"}
        url = f"{self._url}/v1/chat/completions"
        async with session.post(url, data=data, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            if chance.random() < 0.1:
                self.abandoned += 1  # disconnect in the middle of the response
                return
            await answer.read()
            self.served += 1
