"""The mock engine: simulated ranks in real time, with deterministic answers."""

import asyncio
import logging
import time
from pathlib import Path

import msgspec
import numpy as np

from kvmesh.bus.messages import (
    GENERATE,
    Capacity,
    Clear,
    KvEvent,
    Load,
    Pin,
    Pooling,
    Prefetch,
    StartPhase,
    Work,
)
from kvmesh.hashing import FIRST_IMAGE_TOKEN, TOKEN_BYTES
from kvmesh.runtime.service import VERSION
from kvmesh.settings.schema import MockSettings
from kvmesh.step_times.profile import StepProfileError
from kvmesh.worker.adapters.prefetching.queue import PrefetchQueue
from kvmesh.worker.capabilities import TierCounts, never
from kvmesh.worker.clearing import ClearOutcome, combined
from kvmesh.worker.engine import (
    EngineConfigError,
    EngineContext,
    EngineError,
    EngineInfo,
    OutputDelta,
    Rejected,
    Sink,
    StoreFactory,
    Unsupported,
)
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.enginecore.retention_request import parse_retention
from kvmesh.worker.enginecore.sequence import Request, hash_prompt
from kvmesh.worker.engines.engine_tiers import tier_limits
from kvmesh.worker.engines.mock import pooling
from kvmesh.worker.engines.mock.core import MockCore
from kvmesh.worker.engines.mock.core_options import core_options
from kvmesh.worker.engines.mock.faults import Faults
from kvmesh.worker.engines.mock.kvbm_tiers import KvbmTiers, NoArenaUser, stand_in_layout
from kvmesh.worker.engines.mock.prefetch import MockLoader
from kvmesh.worker.engines.mock.rank import MockRank
from kvmesh.worker.engines.mock.text.author import AnswerOptions, AnswerWriter
from kvmesh.worker.engines.mock.text.guided import UnsupportedConstraint
from kvmesh.worker.engines.mock.text.script import Script, ScriptError
from kvmesh.worker.engines.mock.text.source import TextSource
from kvmesh.worker.engines.retention_settings import retention_options
from kvmesh.worker.images import ImageStore, placeholder_of
from kvmesh.worker.model_folder import model_context

log = logging.getLogger(__name__)
BLOCK_S = 1e6


class MockEngine:
    """The engine of `[worker]` and `[mock]` with the model folder's tokenizer.

    It has a `MockRank` per data-parallel rank; the answer to a request is known at its start.
    """

    def __init__(self, context: EngineContext) -> None:
        worker, mock = context.settings.worker, context.settings.mock
        if mock.kvbm and (mock.host_blocks or mock.disk_blocks):
            raise EngineConfigError("mock.kvbm excludes mock.host_blocks and mock.disk_blocks")
        longest = worker.context or model_context(context.folder)
        self.images = ImageStore()
        self._timeline = context.timeline
        self._name = worker.name  # workers of the same settings differ in their random pace
        self._options = mock
        self._folder = context.folder
        self._block_size = worker.block_size
        self._context = min(longest, mock.blocks * worker.block_size)
        self._adapters = worker.adapters
        self._retention = retention_options(worker)
        self._store = context.store if mock.kvbm else None
        self._limits = tier_limits(worker)
        self._ranks: list[MockRank] = []
        self._kvbms: list[KvbmTiers] = []
        self._live: dict[str, _Live] = {}
        self._has_logprobs = False  # of any request so far
        self._writer: AnswerWriter | None = None
        self._sink: Sink | None = None
        self._loader = MockLoader(self._ranks, self._request)
        self._prefetches = PrefetchQueue(self._loader, self._block_size)

    def cannot_sleep(self) -> str:
        return ""

    async def sleep(self) -> None:
        self._sink = None
        await self.close()
        self._ranks.clear()
        self._kvbms.clear()
        self._live.clear()
        self._loader = MockLoader(self._ranks, self._request)
        self._prefetches = PrefetchQueue(self._loader, self._block_size)

    async def park(self) -> None:
        if self._writer is None:
            with self._timeline.phase(StartPhase.CONFIGURATION):
                self._writer = await asyncio.to_thread(self._make_writer)
                await asyncio.sleep(self._options.prepare_s)

    async def lost(self) -> EngineError:
        return await never()

    async def start(self, sink: Sink) -> EngineInfo:
        options = self._options
        await self.park()
        self._sink = sink
        try:
            made = core_options(options, self._block_size, self._retention)
        except StepProfileError as error:
            raise EngineConfigError(str(error)) from error
        if options.startup_s:
            with self._timeline.phase(StartPhase.WEIGHTS):
                await asyncio.sleep(options.startup_s)
        faults = msgspec.convert(options, Faults, from_attributes=True)
        for rank in range(options.dp_ranks):
            core = MockCore(made, f"{self._name} {options.seed} {rank}")
            self._ranks.append(MockRank(rank, core, self, faults, options.tick_s))
        if self._store is not None:
            await self._open_kvbms(self._store)
        for started in self._ranks:
            started.start()
        return self._info()

    async def _open_kvbms(self, store: StoreFactory) -> None:
        for rank in self._ranks:
            client = store(stand_in_layout(self._block_size), NoArenaUser())
            kvbm = KvbmTiers(rank, client, self._limits)
            self._kvbms.append(kvbm)
            await kvbm.open()
            rank.kvbm = kvbm

    def submit(self, work: Work) -> None:
        if not 0 <= work.rank < len(self._ranks):
            raise Rejected(f"there is no rank {work.rank}")
        if self._options.poison:
            # Inject the configured fault if the prompt contains the poison text
            prompt = memoryview(work.tokens).cast("I").tolist()
            if self._writer is not None and self._options.poison in self._writer.text(prompt):
                effect = self._options.poison_effect
                log.warning("injected %s by request %s", effect, work.request)
                if effect == "block":
                    time.sleep(BLOCK_S)
                self._ranks[work.rank].poison(effect)
        try:
            if work.pooling is not None:
                pooling.check(work.pooling)
            request = self._request(work)
            self._ranks[work.rank].submit(request)
        except (UnsupportedConstraint, ValueError) as error:
            raise Rejected(str(error)) from error
        live = self._live[work.request] = _Live(self._ranks[work.rank], work)
        if work.pooling is not None:
            live.pooled = work, work.pooling
        self._has_logprobs |= work.sampling.logprobs is not None
        self._prefetches.on_request(work)

    def prefetch(self, command: Prefetch) -> str:
        if not 0 <= command.rank < len(self._ranks):
            return f"there is no rank {command.rank}"
        if self._options.task != GENERATE:
            return "the model generates no text"
        return self._prefetches.start(command)

    async def measure_image(self, width: int, height: int) -> int:
        if not self._options.image_tokens:
            raise Unsupported("mock.image_tokens is 0")
        return self._options.image_tokens

    def max_adapter_rank(self) -> int:
        return 0

    async def load_adapter(self, identity: str, folder: Path) -> None:
        """Nothing to load: the salt of a request separates the blocks of its adapter."""

    async def unload_adapter(self, identity: str) -> None:
        """Nothing to unload."""

    async def switch_role(self, serves: str) -> None:
        """Nothing to prepare: each request says what another worker computes of it."""

    def tier_counts(self) -> TierCounts | None:
        if self._kvbms:
            return _total([kvbm.counts for kvbm in self._kvbms])
        tiers = [rank.core.tiers for rank in self._ranks]
        if not any(rank.lower for rank in tiers):
            return None
        return TierCounts(
            loaded=[sum(tier) for tier in zip(*(rank.loaded for rank in tiers), strict=True)],
            written=sum(lower.written for rank in tiers for lower in rank.lower),
        )

    def abort(self, request: str) -> bool:
        if self._prefetches.cancel(request):
            return True
        live = self._live.pop(request, None)
        if live is None or self._sink is None:
            return False
        live.rank.abort(request)
        self._sink.output([OutputDelta(request, [], finish="abort")])
        return True

    def load(self, instance: str) -> list[Load]:
        return [rank.load(instance) for rank in self._ranks]

    def dump(self, rank: int) -> None:
        if 0 <= rank < len(self._ranks):
            self._ranks[rank].publish_events()  # those of the step in progress
            self.events(rank, self._ranks[rank].core.dump())

    async def clear(self, command: Clear) -> ClearOutcome:
        return combined(rank.clear(command) for rank in self._ranks)

    # retention

    async def release(self, sessions: list[str]) -> int:
        return sum(
            rank.drop_blocks(lambda manager, _: manager.release(sessions)) for rank in self._ranks
        )

    async def pin(self, pin: Pin) -> int:
        return sum(
            rank.change_retention(lambda manager, now: manager.pin(pin, now))
            for rank in self._ranks
        )

    async def unpin(self, pin: str) -> int:
        return sum(
            rank.change_retention(lambda manager, now: manager.unpin(pin, now))
            for rank in self._ranks
        )

    def retention(self) -> list[RetentionState]:
        now = asyncio.get_running_loop().time()
        return [rank.core.blocks.retention.state(rank.rank, now) for rank in self._ranks]

    async def drain(self) -> None:
        for rank in self._ranks:
            await rank.idle.wait()

    async def hand_down(self, timeout_s: float) -> int:
        return sum(await asyncio.gather(*(kvbm.hand_down(timeout_s) for kvbm in self._kvbms)))

    async def close(self) -> None:
        await self._prefetches.close()
        for kvbm in self._kvbms:
            await kvbm.close()
        for rank in self._ranks:
            await rank.stop()

    # the sink of the ranks

    def output(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if delta.finish is None and not self._has_logprobs:
                continue
            live = self._live.get(delta.request)
            if live is not None and live.logprobs is not None:
                delta.logprobs = [self._logprobs(t, live.logprobs) for t in delta.tokens]
            if delta.finish is not None and live is not None:
                delta.handoff = live.handoff
                if live.pooled is not None:
                    delta.tokens = []
                    delta.vectors = pooling.vectors_of(*live.pooled)
                del self._live[delta.request]
        own = self._loader.hidden.visible(deltas)
        if own and self._sink is not None:
            self._sink.output(own)

    def events(self, rank: int, events: list[KvEvent]) -> None:
        if self._sink is not None:
            self._sink.events(rank, events)

    def events_lost(self, rank: int, count: int) -> None:
        if self._sink is not None:
            self._sink.events_lost(rank, count)

    def failed(self, error: EngineError) -> None:
        if self._sink is not None:
            self._sink.failed(error)

    def _request(self, work: Work) -> Request:
        if self._writer is None:
            raise ValueError("the engine has not started")
        _check_tokens(work, self._writer.vocabulary)
        answer = pooling.ANSWER if work.pooling is not None else self._writer.answer(work)
        if answer.target <= work.generated:
            raise ValueError(f"this answer ends after {answer.target} tokens")
        local, sequence, tail = hash_prompt(work.tokens, self._block_size, work.salt)
        return Request(
            id=work.request,
            length=len(work.tokens) // 4,
            local_hashes=local,
            sequence_hashes=sequence,
            tail=tail,
            source=answer.source,
            target=answer.target,
            finish=answer.finish,
            generated=work.generated,
            salt=work.salt,
            tenant=work.tenant,
            priority=work.priority,
            remote_tokens=_remote_tokens(work),
            retention=parse_retention(work, self._block_size, self._retention.defaults),
            ephemeral=work.ephemeral,
        )

    def _logprobs(self, token: int, alternatives: int) -> dict[int, float]:
        """Logprobs with nearly all probability on `token` and the rest on its neighbours."""
        size = self._writer.vocabulary if self._writer is not None else token + 1
        rest = {(token + i) % size: -4.0 - i for i in range(1, alternatives)}
        return {token: -0.05, **rest}

    def _make_writer(self) -> AnswerWriter:
        options = self._options
        try:
            text = TextSource.of_model(self._folder)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise EngineConfigError(
                f"cannot read the tokenizer in {self._folder}: {error}"
            ) from error
        try:
            script = Script.load(options.script) if options.script is not None else None
        except ScriptError as error:
            raise EngineConfigError(str(error)) from error
        answers = AnswerOptions(
            context=self._context,
            output_tokens=options.output_tokens,
            seed=options.seed,
            reasoning_tokens=options.reasoning_tokens,
            think_open=options.think_open,
            think_close=options.think_close,
        )
        return AnswerWriter(text, answers, script)

    def _info(self) -> EngineInfo:
        options = self._options
        placeholder = placeholder_of(self._folder)
        return EngineInfo(
            reports_outcomes=True,
            name="mock",
            version=VERSION,
            context=self._context,
            block_size=self._block_size,
            adapters=self._adapters,
            structural_tags=True,
            exempts_thinking=options.reasoning_tokens > 0,
            supports_handoff=True,
            tiered=self._store is not None,
            task=options.task,
            image_placeholder=placeholder[1] if placeholder and options.image_tokens else "",
            capacity=Capacity(
                blocks=options.blocks,
                max_sequences=options.max_sequences,
                max_batched_tokens=options.max_batched_tokens,
                dp_ranks=options.dp_ranks,
                tier_blocks=_tier_blocks(options),
            ),
        )


class _Live:
    """The rank of a request, the alternatives wanted per token, its handoff, and its inputs."""

    __slots__ = ("handoff", "logprobs", "pooled", "rank")

    def __init__(self, rank: MockRank, work: Work) -> None:
        self.rank = rank
        self.logprobs = work.sampling.logprobs
        self.pooled: tuple[Work, Pooling] | None = None
        self.handoff = {"tokens": len(work.tokens) // TOKEN_BYTES} if work.prefill else None


def _check_tokens(work: Work, vocabulary: int) -> None:
    """Raises ValueError for ids beyond the vocabulary, as engines with a model do."""
    prompt, found = np.frombuffer(work.tokens, "<u4"), list(work.sampling.logit_bias)
    if prompt.max(initial=0) >= vocabulary:
        found += prompt[(prompt >= vocabulary) & (prompt < FIRST_IMAGE_TOKEN)][:1].tolist()
    for token in found:
        if token >= vocabulary:
            raise ValueError(f"token {token} is not in the model's vocabulary")


def _remote_tokens(work: Work) -> int:
    """Number of prompt tokens that another worker has computed."""
    tokens = (work.handoff or {}).get("tokens", 0)
    return tokens if isinstance(tokens, int) else 0


def _tier_blocks(options: MockSettings) -> list[int]:
    if options.disk_blocks:
        return [options.host_blocks, options.disk_blocks]
    return [options.host_blocks] if options.host_blocks else []


def _total(counts: list[TierCounts]) -> TierCounts:
    return TierCounts(
        loaded=[sum(tier) for tier in zip(*(each.loaded for each in counts), strict=True)],
        written=sum(each.written for each in counts),
        skipped=sum(each.skipped for each in counts),
        corrupt=sum(each.corrupt for each in counts),
    )
