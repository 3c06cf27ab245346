"""A prompt computed by one worker, for another one to go on with its KV."""

import asyncio
from typing import Any

from msgspec.structs import replace

from kvmesh.bus.messages import RankKey, Sampling, Work, prefill_part
from kvmesh.frontend.dispatch.token_inbox import TokenInbox
from kvmesh.frontend.dispatch.token_stream import Nobody, TokenStream
from kvmesh.frontend.dispatch.work_client import WorkClient


class PrefillFailed(Exception):
    """The worker that goes on has to compute the prompt; `code` is for metrics."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RemotePrefill:
    """One prompt on one prefill worker. `sequence` is followed like any other.

    Engines do not stop before a first token, which the worker that goes on computes again.
    """

    def __init__(self, whole: TokenStream, now: float) -> None:
        self.sequence = TokenStream(prefill_part(whole.attempt), Nobody(), now)
        self.sequence.next_attempt()
        self.sequence.tokens = list(whole.tokens)

    async def run(
        self, offers: WorkClient, inbox: TokenInbox, rank: RankKey, work: Work, timeout: float
    ) -> dict[str, Any]:
        """Where the KV is, as the engines understand it; raises PrefillFailed."""
        sequence = self.sequence
        part = _only_prompt(work, sequence.attempt, rank.rank)
        try:
            async with asyncio.timeout(timeout):
                offered = await offers.make(sequence, rank.instance, part)
                if offered.status != "accepted":
                    raise PrefillFailed(offered.status, offered.reason)
                await sequence.ended.wait()
        except TimeoutError as error:
            raise PrefillFailed("timeout", f"not done in {timeout:g} s") from error
        finally:
            inbox.remove(sequence)
            if sequence.instance and not sequence.engine_done:
                offers.cancel(sequence)
        if sequence.finish is None:
            raise PrefillFailed("lost", sequence.lost)
        if sequence.handoff is None:
            reason = sequence.error.message if sequence.error else "no KV was left"
            raise PrefillFailed("failed", reason)
        return sequence.handoff


def _only_prompt(work: Work, request: str, rank: int) -> Work:
    sampling = Sampling(max_tokens=work.generated + 1, temperature=0.0, ignore_eos=True)
    return replace(work, request=request, rank=rank, sampling=sampling, prefill=True)
