"""How long one stream waits while another client sends the worst bodies that it can.

Prints the largest gap between two pieces of a stream that gets a token every few milliseconds:
alone, and beside each body, with the status that the body got and the frontend's peak of memory.
"""

import argparse
import asyncio
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path

import aiohttp
from local_mesh import Mesh, running_mesh

MODEL = "kvmesh-demo"
MIB = 1 << 20
CHAT = "/v1/chat/completions"


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """What they are, where they go and what they hold; each of about `size` bytes."""
    head = f'{{"model":"{MODEL}",'.encode()
    ask = b'"messages":[{"role":"user","content":"x"}]'
    message = b'{"role":"user","content":"x"},'
    text = b'"prompt":"' + b"word, " * (size // 6) + b'"}'
    yield "words", "/v1/tokenize", head + text
    yield "one word", "/v1/tokenize", head + b'"prompt":"' + b"a" * size + b'"}'
    yield "spaces", "/v1/tokenize", head + b'"prompt":"' + b" " * size + b'"}'
    yield "brackets", "/v1/tokenize", head + b'"prompt":"' + b"<" * size + b'"}'
    yield "no ASCII", "/v1/tokenize", head + b'"prompt":"' + "日本 ".encode() * (size // 7) + b'"}'
    yield "as a chat", CHAT, head + ask[:-3] + b"word, " * (size // 6) + b'"}]}'
    marks = b"<|im_end|>" * (size // 10)
    yield "special tokens", CHAT, head + ask[:-3] + marks + b'"}]}'
    bias = b",".join(b'"%d":1' % token for token in range(size // 11))
    yield "logit_bias", CHAT, head + ask + b',"logit_bias":{' + bias + b"}}"
    many = message * min(20_000, size // len(message))
    yield "20,000 messages", "/v1/messages/count_tokens", head + b'"messages":[' + many[:-1] + b"]}"
    ids = b"1234," * (size // 5)
    yield "token ids", "/v1/detokenize", head + b'"tokens":[' + ids + b"1]}"
    nested = b"{}," * (size // 3)
    deep = head + ask + b',"chat_template_kwargs":{"a":[' + nested + b"1]}}"
    yield "empty objects", CHAT, deep


async def gap(mesh: Mesh, during: "asyncio.Future[tuple[int, float]]") -> float:
    """The largest pause of a stream until `during` is done."""
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1900, "stream": True}
    largest = 0.0
    async with aiohttp.ClientSession() as session:
        while True:
            sent = {"model": MODEL, "ignore_eos": True, **body}
            async with session.post(mesh.url + CHAT, json=sent) as answer:
                await answer.content.readany()
                last = time.perf_counter()
                async for _ in answer.content.iter_any():
                    now = time.perf_counter()
                    largest, last = max(largest, now - last), now
                    if during.done():
                        return largest


async def post(mesh: Mesh, path: str, body: bytes) -> tuple[int, float]:
    """Status and seconds."""
    headers = {"content-type": "application/json"}
    started = time.perf_counter()
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(mesh.url + path, data=body, timeout=aiohttp.ClientTimeout(300)) as answer,
    ):
        await answer.read()
        return answer.status, time.perf_counter() - started


def memory(mesh: Mesh, field: str) -> float:
    """MiB of the frontend: `VmRSS` now, `VmHWM` at most since the last `forget_peak`."""
    for line in Path(f"/proc/{mesh.pids['frontend']}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return 0.0


def forget_peak(mesh: Mesh) -> None:
    Path(f"/proc/{mesh.pids['frontend']}/clear_refs").write_text("5")


async def measure(mesh: Mesh, mib: float) -> None:
    quiet = asyncio.ensure_future(asyncio.sleep(5, (0, 0.0)))
    print(f"{'body':<18}{'status':>8}{'took':>10}{'gap':>10}{'peak':>11}{'after':>11}")
    row("(none)", 0, 5.0, await gap(mesh, quiet), mesh)
    for name, path, body in bodies(int(mib * MIB)):
        forget_peak(mesh)
        sent = asyncio.ensure_future(later(post(mesh, path, body)))
        largest = await gap(mesh, sent)
        status, took = await sent
        row(name, status, took, largest, mesh)


async def later(work: Coroutine[None, None, tuple[int, float]]) -> tuple[int, float]:
    await asyncio.sleep(1)
    try:
        return await work
    finally:
        await asyncio.sleep(0.5)


def row(name: str, status: int, took: float, largest: float, mesh: Mesh) -> None:
    peak, after = memory(mesh, "VmHWM"), memory(mesh, "VmRSS")
    print(
        f"{name:<18}{status or '':>8}{took:>8.2f} s{largest * 1e3:>7.0f} ms"
        f"{peak:>7.0f} MiB{after:>7.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=7.9, help="size of each body")
    parser.add_argument("--context", type=int, default=1 << 20, help="context of the model")
    options = parser.parse_args()
    context = str(options.context)
    with running_mesh(workers=1, speedup=1, KVMESH_WORKER_CONTEXT=context) as mesh:
        asyncio.run(measure(mesh, options.mib))


if __name__ == "__main__":
    main()
