"""What it costs to tell a kvbm of a growing prompt: bytes, CPU and time per turn.

An agent's session grows to 128K tokens by 2K a turn: its worker fetches each turn's prompt, offers
what it computes of it in pieces of 1K tokens, and what it generates block by block. The baseline
is the same session told whole each time, as to a kvbm that keeps no prompts.
"""

import tempfile
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import uvloop
from common import Report, cpu_seconds, median, parser
from kv_node import attach, node, numbered

from kvmesh._native import xxh3
from kvmesh.blocks.kvbm_client import KvbmClient, KvbmPrompt, TierSpeeds
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.prompt_delta.blocks import SentBlockPromptCache

BLOCK = 16
TOKENS = 128 << 10
TURN = 2048
GENERATED = 512
PIECE = 1024
LAYOUT = KvLayout(
    weights="t", dtype="float16", item_bytes=2, block_size=BLOCK, layers=[LayerLayout(1, 64, 64)]
)


class Turn(NamedTuple):
    """What a worker sent, how long its fetch took, and CPU seconds of both sides."""

    bytes: int
    fetch_s: float
    worker_s: float
    kvbm_s: float


def begin(whole: KvbmPrompt, blocks: int) -> KvbmPrompt:
    """The first blocks of a prompt."""
    return KvbmPrompt(
        request="r",
        digests=whole.digests[: 16 * blocks],
        sequence_hashes=whole.sequence_hashes[: 8 * blocks],
        local=whole.local[: 8 * blocks],
        salt=whole.salt,
        session="s",
    )


async def fetch(client: KvbmClient, prompt: KvbmPrompt) -> float:
    start = time.perf_counter()
    async with aclosing(client.load(prompt, prompt.blocks, TierSpeeds(), 0.0, 0.0)) as parts:
        async for _ in parts:
            pass
    return time.perf_counter() - start


async def offer(client: KvbmClient, prompt: KvbmPrompt, first: int) -> None:
    async with client.writing(prompt, first) as writing:
        if writing is None:
            raise RuntimeError("nothing was wanted")
        for offset in writing.offsets:
            writing.checksums.append(xxh3(writing.arena.view(offset, LAYOUT.block_bytes)))


async def turn(bus: Bus, kvbm: int, client: KvbmClient, whole: KvbmPrompt, start: int) -> Turn:
    asked = start + TURN - GENERATED
    sent, worker, before = bus.client.stats["out_bytes"], time.process_time(), cpu_seconds(kvbm)
    seconds = await fetch(client, begin(whole, asked // BLOCK))
    ends = [start, *range(start + PIECE, asked, PIECE), *range(asked, start + TURN + 1, BLOCK)]
    for first, end in pairwise(ends):
        await offer(client, begin(whole, end // BLOCK), first // BLOCK)
    return Turn(
        bus.client.stats["out_bytes"] - sent,
        seconds,
        time.process_time() - worker,
        cpu_seconds(kvbm) - before,
    )


async def session(bus: Bus, kvbm: int, seed: int, told_whole: bool) -> list[Turn]:
    """All turns of one session, by a worker that has attached for it."""
    client = await attach(bus, LAYOUT)
    if told_whole:
        attachment = client._attacher.current
        assert attachment is not None
        attachment.prompts = SentBlockPromptCache(0)
    whole = numbered("r", TOKENS // BLOCK, seed)
    turns = [await turn(bus, kvbm, client, whole, start) for start in range(0, TOKENS, TURN)]
    await client.close()
    return turns


def add(report: Report, name: str, unit: str, scale: float, field: str, *ways: list[Turn]) -> float:
    """One row: the median over the turns; returns what the baseline is of it."""
    short, whole = (median(scale * getattr(turn, field) for turn in turns) for turns in ways)
    report.add(name, short, unit, f"{whole:.3g}")
    return whole / short


async def run(json_file: Path | None) -> None:
    report = Report("Telling a kvbm of a growing prompt", "told whole")
    with (
        tempfile.TemporaryDirectory() as folder,
        node(Path(folder), "--host-bytes", "268435456") as running,
    ):
        bus = await running.connect("bench")
        kvbm = running.manager.pid
        ways = [await session(bus, kvbm, seed, seed == 2) for seed in (1, 2)]
        await bus.close()
    last = [turns[-1:] for turns in ways]
    gain = add(report, "bytes sent per turn", "KiB", 1 / 1024, "bytes", *ways)
    add(report, "… in the last turn", "KiB", 1 / 1024, "bytes", *last)
    add(report, "a fetch", "ms", 1e3, "fetch_s", *ways)
    saved = add(report, "CPU of the kvbm per turn", "ms", 1e3, "kvbm_s", *ways)
    add(report, "CPU of the worker's side per turn", "ms", 1e3, "worker_s", *ways)
    report.finish(f"bytes ÷ {gain:.0f}, CPU of the kvbm ÷ {saved:.1f}", json_file)


def main() -> None:
    uvloop.run(run(parser(__doc__ or "").parse_args().json))


if __name__ == "__main__":
    main()
