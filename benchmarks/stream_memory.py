"""Memory of a frontend for each open stream, beside another build's.

Opens streams on a mesh whose engines take a long time for each step, waits until each stream has
its first token, and reads the frontend's proportional memory (PSS) before and after. A few streams
come first, so that every process has run its code. `--build` names a checkout with a `.venv`.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from chat_load import chat, post, prompts, user
from common import Report, median, parser, pss_bytes
from local_mesh import Mesh, kind_of, running_mesh, step_profile
from rows import SHORT

STEP_MS = 1000.0
ROOM = {  # for all prompts at once
    "KVMESH_MOCK_BLOCKS": str(1 << 18),
    "KVMESH_MOCK_MAX_SEQUENCES": "4096",
    "KVMESH_MOCK_MAX_BATCHED_TOKENS": str(1 << 20),
}
OPEN_S = 60.0
EARLY = 32
TOKENS = 512
LOADS = {"36 tokens": SHORT, "4.2K tokens": 4192}


async def opened(url: str, bodies: Sequence[bytes]) -> list[asyncio.StreamWriter]:
    """Connections with a stream each, which has its first token."""
    place = urlsplit(url)
    writers, readers = [], []
    for body in bodies:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(post(url, body))
        writers.append(writer)
        readers.append(reader)
    async with asyncio.timeout(OPEN_S):
        for reader in readers:
            await reader.readuntil(b'"content":"')
            await reader.readuntil(b'"content":"')  # the first one begins the answer
    return writers


async def closed(writers: Sequence[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def growth(mesh: Mesh, words: int, streams: int) -> float:
    """KiB of the frontend for each open stream."""
    texts = prompts(words, words)
    bodies = [chat(user(next(texts)), TOKENS, True) for _ in range(EARLY + streams)]
    await closed(await opened(mesh.url, bodies[:EARLY]))
    await asyncio.sleep(1)
    before = pss_bytes(mesh.pids["frontend"])
    writers = await opened(mesh.url, bodies[EARLY:])
    after = pss_bytes(mesh.pids["frontend"])
    await closed(writers)
    return (after - before) / streams / 1024


def measured(build: Path | None, words: int, streams: int) -> float:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        profile = str(step_profile(Path(folder), STEP_MS))
        options = {"KVMESH_MOCK_PROFILE": profile, **ROOM}
        with running_mesh(4, 1.0, 1, kind_of(build), **options) as mesh:
            return uvloop.run(growth(mesh, words, streams))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--build", type=Path, metavar="CHECKOUT")
    arguments.add_argument("--prompt", choices=LOADS, action="append")
    arguments.add_argument("--streams", type=int, default=1000, metavar="N")
    arguments.add_argument("--rounds", type=int, default=3, metavar="N")
    options = arguments.parse_args()
    report = Report("Memory of an open stream", "the other build")
    for name, words in LOADS.items():
        if options.prompt and name not in options.prompt:
            continue
        here, there = [], []
        for _ in range(options.rounds):
            here.append(measured(None, words, options.streams))
            if options.build is not None:
                there.append(measured(options.build, words, options.streams))
        other = f"{median(there):.3g}" if there else ""
        report.add_runs(f"prompt of {name}", here, "KiB", other)
    report.finish(f"{options.streams} streams", options.json)


if __name__ == "__main__":
    main()
