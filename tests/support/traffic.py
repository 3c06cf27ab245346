"""Clients of a mesh that know what the answers must be, and notice every pause."""

import asyncio
import itertools
import time

from openai import AsyncOpenAI, OpenAIError

from support.wait import eventually

CLIENTS = 16
TOKENS = 60


class Traffic:
    """Each client asks again as soon as it is answered."""

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._running = True
        self._answers: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.whole = 0
        self.failed: list[str] = []
        self.longest = 0.0

    async def start(self) -> None:
        """Learn the right answers, then begin."""
        prompts = [f"Client {number}, what is asked of it. " * 20 for number in range(CLIENTS)]
        for prompt in prompts:
            self._answers[prompt] = await self.stream(prompt)
        self.longest = 0.0
        for prompt in prompts:
            self._tasks.append(asyncio.create_task(self._ask([prompt])))

    async def _ask(self, prompts: list[str]) -> None:
        for prompt in itertools.cycle(prompts):
            if not self._running:
                return
            try:
                answer = await self.stream(prompt)
                assert answer == self._answers[prompt], f"{answer!r} to {prompt!r}"
                self.whole += 1
            except (OpenAIError, AssertionError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def stream(self, prompt: str, tokens: int = TOKENS) -> str:
        """A whole answer; raises OpenAIError, or AssertionError if it broke off."""
        heard = time.monotonic()
        chunks = await self._client.chat.completions.create(
            model="kvmesh-demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, count = "", 0
        async for chunk in chunks:
            self.longest = max(self.longest, time.monotonic() - heard)
            heard = time.monotonic()
            count = chunk.usage.completion_tokens if chunk.usage else count
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert count == tokens, f"the stream broke off after {count} tokens"
        return text

    async def more(self, count: int = 2 * CLIENTS) -> None:
        """Wait until `count` more answers have arrived whole."""
        target = self.whole + count
        await eventually(lambda: self.whole >= target, what=f"{self.failed[-5:]}")

    async def stop(self) -> None:
        """Let the running answers end."""
        self._running = False
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=120)
        await self._client.close()
