"""Batches on an idle fleet, and beside interactive requests.

First the same requests are sent one by one, all at once, and as a batch: the batch's share of that
throughput. Then interactive requests arrive at random, alone and beside a batch that does not end
meanwhile: the ratios of their times. Engines are mock engines in real time, slow enough that the
machine is not what limits them; both halves take turns, `--rounds` times.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
from chat_load import MODEL, prompts
from common import Report, median, parser, percentile
from local_mesh import running_mesh

ENDPOINT = "/v1/completions"
POLL_S = 0.1
WARM_S = 5.0  # of a batch beside which others are measured
ENDED = ("completed", "failed", "expired", "cancelled")


class Load(NamedTuple):
    """Requests: their number or rate, and the tokens of each prompt and answer."""

    number: int
    tokens: tuple[int, int]
    answer: tuple[int, int]


class Times(NamedTuple):
    first: float
    whole: float


def bodies(load: Load, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for number in range(load.number):
        prompt = next(prompts(seed * 100_003 + number, rng.randint(*load.tokens)))
        limit = rng.randint(*load.answer)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": limit, "ignore_eos": True}
        found.append(body)
    return found


async def send(http: aiohttp.ClientSession, body: dict[str, Any]) -> Times:
    began, first = time.monotonic(), 0.0
    async with http.post(ENDPOINT, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first and line.startswith(b"data: {"):
                first = time.monotonic() - began
    return Times(first, time.monotonic() - began)


async def begin(http: aiohttp.ClientSession, requests: list[dict[str, Any]]) -> str:
    """The id of a batch of these requests."""
    lines = [
        json.dumps({"custom_id": str(n), "method": "POST", "url": ENDPOINT, "body": body})
        for n, body in enumerate(requests)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(lines).encode(), filename="requests.jsonl")
    file = await (await http.post("/v1/files", data=form)).json()
    batch = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return str((await (await http.post("/v1/batches", json=batch)).json())["id"])


async def state(http: aiohttp.ClientSession, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = await (await http.get(f"/v1/batches/{batch}")).json()
    return found


async def until(
    http: aiohttp.ClientSession, batch: str, reached: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    while not reached(found := await state(http, batch)):
        await asyncio.sleep(POLL_S)
    return found


async def idle(http: aiohttp.ClientSession, load: Load, seed: int, quiet_s: float) -> float:
    """The throughput of a batch, as a share of that of the same requests sent at once."""
    began = time.monotonic()
    await asyncio.gather(*(send(http, body) for body in bodies(load, seed)))
    direct = time.monotonic() - began
    await asyncio.sleep(quiet_s)
    batch = await begin(http, bodies(load, seed + 1))
    began = time.monotonic()
    await until(http, batch, lambda found: found["request_counts"]["completed"] == load.number)
    return direct / (time.monotonic() - began)


async def arrive(http: aiohttp.ClientSession, load: Load, seconds: float, seed: int) -> list[Times]:
    """The times of requests that arrive at random within so many seconds."""
    rng, began = random.Random(seed), time.monotonic()
    at = sorted(rng.random() * seconds for _ in range(load.number))

    async def one(after: float, body: dict[str, Any]) -> Times:
        await asyncio.sleep(began + after - time.monotonic())
        return await send(http, body)

    made = bodies(load, seed)
    return await asyncio.gather(*(one(a, body) for a, body in zip(at, made, strict=True)))


async def beside(
    http: aiohttp.ClientSession, load: Load, seconds: float, seed: int
) -> tuple[list[Times], list[Times], float]:
    """Times alone and beside a batch, and the requests of that batch that ended per second."""
    alone = await arrive(http, load, seconds, seed)
    batch = await begin(http, bodies(load._replace(number=5000), seed + 2))
    await asyncio.sleep(WARM_S)
    before = (await state(http, batch))["request_counts"]["completed"]
    both = await arrive(http, load, seconds, seed)
    found = await state(http, batch)
    await http.post(f"/v1/batches/{batch}/cancel")
    await until(http, batch, lambda each: each["status"] in ENDED)
    return alone, both, (found["request_counts"]["completed"] - before) / seconds


async def run(url: str, options: Any, report: Report) -> None:
    load = Load(options.requests, (200, 800), (20, 60))
    shares: list[float] = []
    alone: list[Times] = []
    both: list[Times] = []
    done: list[float] = []
    limit = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=limit, timeout=timeout) as http:
        await asyncio.gather(*(send(http, body) for body in bodies(load._replace(number=20), 1)))
        for number in range(options.rounds):
            few = load._replace(number=round(options.rate * options.seconds))
            found = await beside(http, few, options.seconds, 10 * number)
            alone += found[0]
            both += found[1]
            done.append(found[2])
            shares.append(await idle(http, load, 10 * number + 5, options.quiet))
    report.add_runs("batch, share of the direct throughput of an idle fleet", shares, "", "")
    report.add_runs("requests of a batch beside others", done, "1/s", "")
    for name in Times._fields:
        for share in (0.5, 0.95, 0.99):
            one, two = (
                percentile([getattr(t, name) for t in times], share) for times in (alone, both)
            )
            report.add(f"{name}, p{share * 100:.0f}", two, "s", f"{one:.3f}", f"{two / one:.3f}")
    report.finish(f"a batch has {median(shares):.2f} of an idle fleet's throughput", options.json)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--speedup", type=float, default=0.5, help="of the mock engines")
    arguments.add_argument("--requests", type=int, default=400, help="of a batch on an idle fleet")
    arguments.add_argument("--rate", type=float, default=2.0, help="interactive requests a second")
    arguments.add_argument("--seconds", type=float, default=100.0, help="of interactive requests")
    arguments.add_argument(
        "--quiet", type=float, default=32.0, help="seconds until a fleet is idle"
    )
    arguments.add_argument("--rounds", type=int, default=1)
    options = arguments.parse_args()
    report = Report("Batches on an idle fleet and beside interactive requests", "alone")
    with running_mesh(options.workers, options.speedup, KVMESH_FRONTEND_ACCESS_LOG="off") as mesh:
        asyncio.run(run(mesh.url, options, report))


if __name__ == "__main__":
    main()
