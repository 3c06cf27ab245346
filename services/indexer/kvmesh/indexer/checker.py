"""Checks of the index against workers: one rank now and then, and any rank on request."""

import asyncio
import logging
import random
from dataclasses import dataclass

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import CheckIndex, ControlReply, Dump, IndexCheck, MessageDecoder, RankKey
from kvmesh.indexer.index_check import Segments, compare, describe, indexed_blocks
from kvmesh.indexer.rank_state import RankStates

log = logging.getLogger(__name__)
questions = MessageDecoder(CheckIndex)
_replies = MessageDecoder(ControlReply)
REPLY_S = 2.0  # for a digest
EVENTS_S = 5.0  # for the events before it
TRIES = 3


@dataclass(slots=True)
class CheckCounts:
    """Totals since the start, by metric name."""

    index_checks: int = 0
    index_differences: int = 0
    inconclusive_checks: int = 0
    missing_blocks: int = 0
    extra_blocks: int = 0


class IndexChecker:
    """Compares ranks with their workers, and has a rank that differs dumped anew.

    The worker's reply has a digest of its blocks and the id of its next event. Once the index has
    applied the events before that id, both must be the same, whatever happens meanwhile.
    """

    def __init__(self, bus: Bus, states: RankStates) -> None:
        self._bus = bus
        self._states = states
        self._last = RankKey("", 0)
        self._undigested: set[str] = (
            set()
        )  # older workers, which publish a dump when they are asked
        self.counts = CheckCounts()

    async def run(self, interval_s: float) -> None:
        """Check one known rank after another, one per interval, until cancelled."""
        await asyncio.sleep(random.uniform(0, interval_s))  # replicas at different times
        while True:
            key = self._states.next_worker_rank(self._last)
            if key is not None:
                self._last = key
                if key.instance not in self._undigested:
                    await self.check(key)
            await asyncio.sleep(interval_s)

    async def answer(self, question: CheckIndex, reply: Reply) -> None:
        """Check the rank that an operator asks for."""
        reply(await self.check(RankKey(question.instance, question.rank)))

    async def check(self, key: RankKey) -> IndexCheck:
        """Compare one rank; one that differs becomes unknown, so that it is dumped anew."""
        if not self._states.shard.whole:
            return IndexCheck(result="failed", reason="the index is divided into shards")
        if not self._states.is_worker(key.instance):
            return IndexCheck(result="failed", reason="no such worker")
        for _ in range(TRIES):
            check = await self._compare(key)
            if check.result != "moved":
                break
        self._count(key, check)
        return check

    def _count(self, key: RankKey, check: IndexCheck) -> None:
        counts = self.counts
        if check.result in ("equal", "differs"):
            counts.index_checks += 1
        else:
            counts.inconclusive_checks += 1
        if check.result == "differs":
            counts.index_differences += 1
            counts.missing_blocks += check.missing or 0
            counts.extra_blocks += check.extra or 0
            log.warning(
                "the index is wrong about rank %d of %s and has it dumped anew: %s",
                *(key.rank, key.instance, describe(check)),
            )
            self._states.doubt(key)

    def _refusal(self, key: RankKey, reply: ControlReply) -> str:
        """The reason of a reply that has no digest at an event id."""
        if not reply.ok or reply.blocks:
            return reply.reason or "a dump of the rank is due"
        live = filter(self._states.is_worker, self._undigested)
        self._undigested = {*live, key.instance}
        return "the worker's version has no digests"

    async def _compare(self, key: RankKey) -> IndexCheck:
        if not self._states.is_known(key):
            return IndexCheck(result="unknown")
        subject = self._bus.subjects.dump(key.instance)
        question = Dump(key.rank, digest=True, listed=True)
        try:
            reply = await self._bus.request(subject, question, _replies, REPLY_S)
        except BusError as error:
            return IndexCheck(result="failed", reason=cause(error))
        if not reply.ok or reply.next_event is None:
            return IndexCheck(result="failed", reason=self._refusal(key, reply))
        taken: asyncio.Future[Segments | None] = asyncio.get_running_loop().create_future()

        def take(segments: Segments | None) -> None:
            if not taken.done():  # it is, once the wait has ended and before its checkpoint has
                taken.set_result(segments)

        if not self._states.take_at(key, reply.next_event, take):
            return IndexCheck(result="moved")
        try:
            async with asyncio.timeout(EVENTS_S):
                segments = await taken
        except TimeoutError:
            reason = f"the worker's events did not arrive in {EVENTS_S:g} s"
            return IndexCheck(result="failed", reason=reason)
        finally:
            if taken.cancelled():
                self._states.cancel_checkpoint(key)
        if segments is None:
            return IndexCheck(result="unknown")
        try:
            return compare(indexed_blocks(segments), reply)
        except ValueError as error:
            return IndexCheck(result="failed", reason=f"malformed fingerprints: {error}")
