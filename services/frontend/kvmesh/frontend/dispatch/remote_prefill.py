"""Computation of a prompt by a prefill worker, whose KV a decode worker then uses."""

import asyncio
from typing import Any

from msgspec.structs import replace

from kvmesh.bus.messages import RankKey, Work, prefill_part
from kvmesh.frontend.dispatch.liveness import LivenessMonitor
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.dispatch.work_client import WorkClient


class PrefillFailed(Exception):
    """The decode worker has to compute the prompt; `code` labels the metric."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RemotePrefill:
    """One prompt on one prefill worker, monitored like any other sequence.

    Engines do not stop before a first token. SGLang and TensorRT-LLM hand it over, so it is sampled
    as requested; other engines compute it again on the decode worker.
    """

    def __init__(self, model: str, sequence: TokenStream, now: float) -> None:
        self._model = model
        self.stream = TokenStream(
            prefill_part(sequence.attempt),
            now,
            sequence.tokens,
            prompt_tokens=sequence.prompt_tokens,
        )
        self.stream.next_attempt()

    async def run(
        self,
        workers: WorkClient,
        monitor: LivenessMonitor,
        rank: RankKey,
        work: Work,
        timeout: float,
    ) -> dict[str, Any]:
        """Return the engine's handoff: the location of the KV. Raises PrefillFailed."""
        stream = self.stream
        prompt_work = _prompt_only(work, stream, rank.rank)
        stream.limit = prompt_work.sampling.max_tokens
        monitor.watch(self._model, stream)
        try:
            async with asyncio.timeout(timeout):
                offered = await workers.offer(stream, _ignore, rank.instance, prompt_work)
                if offered.status != "accepted":
                    raise PrefillFailed(offered.status, offered.reason)
                await stream.ended.wait()
        except TimeoutError as error:
            raise PrefillFailed("timeout", f"not done in {timeout:g} s") from error
        finally:
            monitor.unwatch(stream)
            workers.inbox.remove(stream)
            if stream.instance and not stream.engine_done:
                workers.cancel(stream)
        if stream.finish is None:
            raise PrefillFailed("lost", stream.lost)
        if stream.handoff is None:
            raise PrefillFailed(
                "failed", stream.error.message if stream.error else "no KV was left"
            )
        return stream.handoff


def _prompt_only(work: Work, stream: TokenStream, rank: int) -> Work:
    last = work.generated + 1
    sampling = replace(
        work.sampling,
        max_tokens=last,
        min_tokens=min(work.sampling.min_tokens, last),
        ignore_eos=True,
        stop_token_ids=[],
    )
    return replace(
        work, request=stream.work, ref=stream.ref, rank=rank, sampling=sampling, prefill=True
    )


def _ignore() -> None:
    """Consumer of tokens that no client receives."""
