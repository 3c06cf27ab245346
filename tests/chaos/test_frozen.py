"""Processes that freeze, and that every packet reaches late: clients notice a pause at most.

Two routers, two indexers and four workers serve sixteen streams without end. One process is stopped
or delayed, and thaws later. No request fails, every answer is the one that its prompt always has,
and no stream is silent for longer than it takes to give the process up.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from openai import AsyncOpenAI, OpenAIError
from support.mesh import Mesh
from support.nats import NatsServer
from support.proxy import Proxy
from support.wait import eventually

CLIENTS = 16
TOKENS = 40
PAUSE_S = 2.0  # what a client may notice
SLACK_S = 4.0  # for machines on which everything is slow; a frozen router used to cost a minute
DELAY_S = 2.0
FROZEN_S = 4.0  # long enough for what nobody takes up to show


@dataclass
class Stage:
    """The mesh, and what it answers to each of the clients' prompts while nothing is wrong."""

    mesh: Mesh
    proxies: dict[str, Proxy]
    answers: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def stage(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    env = {"KVMESH_MOCK_SPEEDUP": "2", "KVMESH_STREAMS_LEASE_S": "30"}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("frozen"), env)
    proxies = {name: Proxy(nats_server.port) for name in ("router-0", "indexer-0")}
    try:
        for proxy in proxies.values():
            proxy.start()
        for role, count in {"indexer": 2, "router": 2, "worker": 4}.items():
            for name in (f"{role}-{number}" for number in range(count)):
                own = {"KVMESH_NATS_URL": proxies[name].url} if name in proxies else {}
                mesh.start(role, name, **own)
        mesh.start("frontend", "frontend-0")
        asyncio.run(mesh.ready())
        yield Stage(mesh, proxies)
    finally:
        mesh.stop()
        for proxy in proxies.values():
            proxy.stop()


class Traffic:
    """Clients that ask again as soon as they are answered, and know what the answer must be."""

    def __init__(self, stage: Stage) -> None:
        url = f"{stage.mesh.url}/v1"
        self._client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        self._running = True
        self._answers = stage.answers
        self._tasks: list[asyncio.Task[None]] = []
        self.whole = 0
        self.failed: list[str] = []
        self.longest = 0.0

    async def start(self) -> None:
        """Learn the right answers, unless they are known, then begin."""
        prompts = [f"Client {number % CLIENTS}, question {number}. " * 20 for number in range(32)]
        for prompt in prompts:
            if prompt not in self._answers:
                self._answers[prompt] = await self._stream(prompt)
        self.longest = 0.0
        for number in range(CLIENTS):
            own = prompts[number::CLIENTS]
            self._tasks.append(asyncio.create_task(self._ask(own)))

    async def _ask(self, prompts: list[str]) -> None:
        for prompt in itertools.cycle(prompts):
            if not self._running:
                return
            try:
                answer = await self._stream(prompt)
                assert answer == self._answers[prompt], f"{answer!r} to {prompt!r}"
                self.whole += 1
            except (OpenAIError, AssertionError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def _stream(self, prompt: str) -> str:
        heard = time.monotonic()
        chunks = await self._client.chat.completions.create(
            model="kvmesh-demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, tokens = "", 0
        async for chunk in chunks:
            self.longest = max(self.longest, time.monotonic() - heard)
            heard = time.monotonic()
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert tokens == TOKENS, f"the stream broke off after {tokens} tokens"
        return text

    async def more(self, count: int = 2 * CLIENTS) -> None:
        """Wait until `count` more answers have arrived whole."""
        target = self.whole + count
        await eventually(lambda: self.whole >= target, what=f"{self.failed[-5:]}")

    async def pass_by(self, seconds: float) -> None:
        """Let traffic go on for this long at least, and until some answers have come."""
        ends = time.monotonic() + seconds
        await eventually(lambda: time.monotonic() > ends)
        await self.more(CLIENTS)

    async def stop(self) -> None:
        self._running = False
        await asyncio.wait(self._tasks, timeout=120)
        await self._client.close()

    def check(self, pause: float = PAUSE_S + SLACK_S) -> None:
        """Nothing failed, and nobody waited for longer than `pause`."""
        print(f"{self.whole} answers, longest pause {self.longest:.2f} s")
        assert self.failed == []
        assert self.longest <= pause


@pytest.mark.parametrize("name", ["router-0", "indexer-0"])
async def test_a_frozen_process_is_left_out_and_does_no_harm_when_it_thaws(
    stage: Stage, name: str
) -> None:
    traffic = Traffic(stage)
    await traffic.start()
    await traffic.more()
    process = stage.mesh.processes[name]
    process.send_signal(signal.SIGSTOP)
    try:
        await traffic.pass_by(FROZEN_S)
    finally:
        process.send_signal(signal.SIGCONT)
    await traffic.more()
    await traffic.stop()
    traffic.check()
    await _nothing_is_left(stage)


@pytest.mark.parametrize("name", ["router-0", "indexer-0"])
async def test_a_process_that_every_packet_reaches_late_is_left_out(
    stage: Stage, name: str
) -> None:
    traffic = Traffic(stage)
    await traffic.start()
    await traffic.more()
    stage.proxies[name].delay_s = DELAY_S
    try:
        await traffic.pass_by(FROZEN_S)
    finally:
        stage.proxies[name].delay_s = 0.0
    await traffic.more()
    await traffic.stop()
    traffic.check()
    await _nothing_is_left(stage)


async def test_a_frontend_that_thaws_finds_its_answers_and_fails_nothing(stage: Stage) -> None:
    traffic = Traffic(stage)
    await traffic.start()
    await traffic.more()
    process = stage.mesh.processes["frontend-0"]
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)  # that nothing happens meanwhile is what is tested
        process.send_signal(signal.SIGCONT)
        await traffic.more(CLIENTS)
    await traffic.stop()
    assert traffic.failed == []
    await _nothing_is_left(stage)


async def _nothing_is_left(stage: Stage) -> None:
    """Nothing runs for nobody."""
    await eventually(lambda: stage.mesh.metric("kvmesh_worker_running_requests") == 0)
