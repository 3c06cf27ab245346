"""Clients that check the outputs of a mesh and measure pauses in its streams."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Self

from openai import AsyncOpenAI, OpenAIError

from support.wait import eventually

CLIENTS = 16
TOKENS = 60


def distinct_prompts(each: int = 1, clients: int = CLIENTS) -> list[str]:
    """`each` distinct prompts per client."""
    return [
        f"Question {number}, and what is asked in it. " * 20 for number in range(each * clients)
    ]


class Traffic:
    """Clients that stream outputs and send their next prompt after each.

    `answers` are the known right outputs by prompt; `start` learns the others. As a context, the
    clients run within it; an error in it ends them at once.
    """

    def __init__(
        self,
        url: str,
        prompts: Sequence[str] = tuple(distinct_prompts()),
        clients: int = CLIENTS,
        tokens: int = TOKENS,
        model: str = "kvmesh-demo",
        answers: dict[str, str] | None = None,
    ) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._prompts = prompts
        self._clients = clients
        self._tokens = tokens
        self._model = model
        self._answers = {} if answers is None else answers
        self._running = True
        self._tasks: list[asyncio.Task[None]] = []
        self.completed = 0
        self.failed: list[str] = []
        self.longest_pause = 0.0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await self.stop()

    async def start(self) -> None:
        """Learn unknown right outputs, then start the clients."""
        unknown = [prompt for prompt in self._prompts if prompt not in self._answers]
        answers = await asyncio.gather(*(self.stream(prompt) for prompt in unknown))
        self._answers.update(zip(unknown, answers, strict=True))
        self.longest_pause = 0.0
        for number in range(self._clients):
            own = self._prompts[number :: self._clients]
            self._tasks.append(asyncio.create_task(self._run_client(own)))

    async def _run_client(self, prompts: Sequence[str]) -> None:
        for prompt in itertools.cycle(prompts):
            if not self._running:
                return
            try:
                answer = await self.stream(prompt)
                assert answer == self._answers[prompt], f"{answer!r} to {prompt!r}"
                self.completed += 1
            except (OpenAIError, AssertionError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def stream(self, prompt: str, tokens: int = 0) -> str:
        """A complete output; raises OpenAIError, or AssertionError if it is incomplete."""
        received = time.monotonic()
        most = tokens or self._tokens
        chunks = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=most,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, count = "", 0
        async for chunk in chunks:
            self.longest_pause = max(self.longest_pause, time.monotonic() - received)
            received = time.monotonic()
            count = chunk.usage.completion_tokens if chunk.usage else count
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert count == most, f"the stream ended after {count} tokens"
        return text

    async def wait_for_outputs(self, count: int = 2 * CLIENTS) -> None:
        """Wait for `count` more complete outputs."""
        target = self.completed + count
        await eventually(lambda: self.completed >= target, what=f"{self.failed[-5:]}")

    async def run_for(self, seconds: float) -> None:
        """Run for at least this long, then wait for as many outputs as there are clients."""
        ends = time.monotonic() + seconds
        await eventually(lambda: time.monotonic() > ends)
        await self.wait_for_outputs(self._clients)

    async def stop(self) -> None:
        """Let the running requests end."""
        self._running = False
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=120)
        await self._client.close()

    def check(self, pause: float) -> None:
        """Assert that no request failed and none paused for longer than `pause`."""
        print(f"{self.completed} answers, longest pause {self.longest_pause:.2f} s")
        assert self.failed == []
        assert self.longest_pause <= pause
