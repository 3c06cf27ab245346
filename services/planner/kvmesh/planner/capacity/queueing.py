"""Latencies that a candidate fleet would give to known requests, without its blocks and routes.

Each worker batches continuously with chunked prefill, as vLLM V1 does: a step computes a chunk of
prompt tokens and one token of each decoding sequence. Requests go to the worker of the least cost,
as routers count it but for cached blocks, and are held until their turn, as by routers. A request
costs some 20 µs, a tenth of the whole simulator's time or less; cached tokens are given, not found.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf
from typing import Protocol

from kvmesh.placement_rules.holding import HOLD_S, fixed_tokens, has_turn, yielded_s
from kvmesh.placement_rules.weights import (
    CROWD_WEIGHT,
    DECODE_WEIGHT,
    MOST_CROWD_WEIGHT,
    STALL_WEIGHT,
)
from kvmesh.settings.schema import RouterSettings

QUEUE_STEPS = RouterSettings().queue_threshold


class StepTimes(Protocol):
    """Seconds of one engine step; prefill and decode add up."""

    def prefill(self, tokens: int) -> float:
        """Seconds to compute `tokens` prompt tokens in one step; 0 for none."""
        ...

    def decode(self, sequences: int, tokens: float) -> float:
        """Seconds to generate one token for each of `sequences`, with `tokens` of KV in all."""
        ...


class SlowedTimes:
    """Step times multiplied by a factor."""

    def __init__(self, times: StepTimes, factor: float) -> None:
        self._times = times
        self._factor = factor

    def prefill(self, tokens: int) -> float:
        return self._factor * self._times.prefill(tokens)

    def decode(self, sequences: int, tokens: float) -> float:
        return self._factor * self._times.decode(sequences, tokens)


@dataclass(frozen=True)
class ModelledEngine:
    """The properties of a kind of worker that decide its latencies; sizes in tokens."""

    times: StepTimes
    step_tokens: int
    max_sequences: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class RequestShape:
    """One request: arrival in seconds, prompt tokens to compute, tokens of prompt and output.

    `request_class` names the promises that apply to it.
    """

    at: float
    uncached: int
    prompt: int
    output: int
    request_class: str = ""


@dataclass
class Latencies:
    """Seconds per request, in the order of the requests: first token, gap between tokens, wait.

    `itl` is the mean gap, -1 for an output of one token; `queue` is the wait before the first step
    that computes prompt tokens. `busy` is the share of time that the workers step.
    """

    ttft: list[float]
    itl: list[float]
    queue: list[float]
    busy: float


class _Worker:
    """One engine, advanced lazily; `now` is the end of its last step."""

    __slots__ = (
        "_itl",
        "_queue",
        "_requests",
        "_ttft",
        "busy",
        "clock",
        "computed",
        "computed_at",
        "decoding",
        "held",
        "kind",
        "kv",
        "now",
        "pending",
        "queued",
        "sent",
        "waiting",
    )

    def __init__(
        self,
        kind: ModelledEngine,
        requests: Sequence[RequestShape],
        ttft: list[float],
        itl: list[float],
        queue: list[float],
    ) -> None:
        self.kind = kind
        self._requests = requests
        self._ttft = ttft
        self._itl = itl
        self._queue = queue
        self.now = 0.0
        self.busy = 0.0
        self.kv = 0
        self.pending = 0
        self.clock = 0
        self.computed, self.computed_at = 0, 0.0  # tokens of the last prompts, and their end
        self.sent = 0  # tokens of prompts that are in the engine until their first token
        self.held: list[tuple[float, int, int]] = []  # position, number, tokens
        self.queued: deque[tuple[int, int]] = deque()  # number, tokens
        self.waiting: deque[list[int]] = deque()  # number of the request, tokens left
        self.decoding: list[tuple[int, int, float]] = []  # last step, number, first token at

    def submit(self, number: int, at: float) -> None:
        if self.now < at:
            self.advance(at)
        tokens = max(self._requests[number].uncached, 1)
        backlog = self._backlog() + (self.computed if at < self.computed_at else 0)
        if self.queued or backlog > QUEUE_STEPS * self.kind.step_tokens:
            self.queued.append((number, tokens))
        else:
            late = yielded_s(tokens, self.kind.step_tokens)
            heappush(self.held, (at + late, number, tokens))
        if at >= self.computed_at:
            self._send()
        self.pending += tokens

    def cost(self, uncached: int) -> float:
        """The cost of a request with so many uncached tokens here, in tokens of prefill."""
        stalled = uncached * (
            len(self.held) + len(self.queued) + len(self.waiting) + len(self.decoding)
        )
        crowd = CROWD_WEIGHT * (self.kv / self.kind.kv_tokens) ** 2
        held = self.kv * (DECODE_WEIGHT + min(crowd, MOST_CROWD_WEIGHT))
        return self.pending + STALL_WEIGHT * stalled + held

    def advance(self, until: float) -> None:
        """Take steps until the first one that ends at or after `until`."""
        while self.now < until:
            if self.held or self.queued:
                self._send()
            if self.waiting and self._admits():
                self._prefill_step()
            elif self.decoding:
                self._decode_steps(until)
            elif self.waiting:  # longer than the whole KV memory: it would be refused
                number, left = self.waiting.popleft()
                self.pending -= left
                self.sent -= max(self._requests[number].uncached, 1)
                self._ttft[number] = inf
            else:
                self.now = until

    def _backlog(self) -> int:
        """Tokens of the prompts without a first token that are held or in the engine."""
        return self.sent + sum([tokens for _, _, tokens in self.held])

    def _send(self) -> None:
        """Pass prompts to the engine: held ones while it has few tokens, queued ones in turn."""
        held, step = self.held, self.kind.step_tokens
        backlog = self._backlog()
        fixed = fixed_tokens(step)  # routers that compared no ranks do not know decode times
        while held:
            _, number, tokens = held[0]
            overdue = self.now >= self._requests[number].at + HOLD_S
            if not overdue and not has_turn(tokens, self.sent, backlog, fixed):
                break
            heappop(held)
            self.waiting.append([number, tokens])
            self.sent += tokens
        while self.queued and backlog <= QUEUE_STEPS * step:
            number, tokens = self.queued.popleft()
            self.waiting.append([number, tokens])
            self.sent += tokens
            backlog += tokens

    def _admits(self) -> bool:
        request = self._requests[self.waiting[0][0]]
        room = self.kv + request.prompt <= self.kind.kv_tokens
        return room and len(self.decoding) < self.kind.max_sequences

    def _prefill_step(self) -> None:
        kind, decoding = self.kind, self.decoding
        budget = max(kind.step_tokens - len(decoding), 1)
        chunk = 0
        done: list[int] = []
        while self.waiting and chunk < budget and self._admits():
            head = self.waiting[0]
            if self._queue[head[0]] == inf:
                self._queue[head[0]] = self.now - self._requests[head[0]].at
            take = min(head[1], budget - chunk)
            chunk += take
            head[1] -= take
            if head[1]:
                break
            self.waiting.popleft()
            done.append(head[0])
            self.kv += self._requests[head[0]].prompt
        seconds = kind.times.prefill(chunk)
        if decoding:
            seconds += kind.times.decode(len(decoding), self.kv)
            self.kv += len(decoding)
        self.pending -= chunk
        self.clock += 1
        self.now += seconds
        self.busy += seconds
        self._finish()
        if done:
            self.computed, self.computed_at = 0, self.now
        for number in done:
            request = self._requests[number]
            self.computed += max(request.uncached, 1)
            self._ttft[number] = self.now - request.at
            self.sent -= max(request.uncached, 1)
            if request.output > 1:
                heappush(decoding, (self.clock + request.output - 1, number, self.now))
            else:
                self.kv -= request.prompt

    def _decode_steps(self, until: float) -> None:
        decoding = self.decoding
        count = len(decoding)
        seconds = max(self.kind.times.decode(count, self.kv), 1e-6)
        steps = min(decoding[0][0] - self.clock, max(ceil((until - self.now) / seconds), 1))
        if steps > 1:
            seconds = max(self.kind.times.decode(count, self.kv + count * (steps - 1) / 2), 1e-6)
        self.clock += steps
        self.kv += count * steps
        self.now += seconds * steps
        self.busy += seconds * steps
        self._finish()

    def _finish(self) -> None:
        decoding, clock = self.decoding, self.clock
        while decoding and decoding[0][0] <= clock:
            _, number, first = heappop(decoding)
            request = self._requests[number]
            self._itl[number] = (self.now - first) / (request.output - 1)
            self.kv -= request.prompt + request.output - 1


def latencies(requests: Sequence[RequestShape], workers: Sequence[ModelledEngine]) -> Latencies:
    """The latencies of `requests`, sorted by arrival, on idle `workers`; infinite without any."""
    count = len(requests)
    ttft, itl, queue = [inf] * count, [-1.0] * count, [inf] * count
    if not workers:
        return Latencies(ttft, itl, queue, 1.0)
    fleet = [_Worker(kind, requests, ttft, itl, queue) for kind in workers]
    for number, request in enumerate(requests):
        at = request.at
        best, least = fleet[0], inf
        for worker in fleet:
            if worker.now < at:
                worker.advance(at)
            cost = worker.cost(request.uncached)
            if cost < least:
                best, least = worker, cost
        best.submit(number, at)
    end = requests[-1].at if requests else 0.0
    busy = 0.0
    for worker in fleet:
        worker.advance(end)
        busy += min(worker.busy, end)
        while worker.held or worker.queued or worker.waiting or worker.decoding:
            worker.advance(worker.now + 3600.0)
    return Latencies(ttft, itl, queue, busy / (len(fleet) * end) if end > 0 else 0.0)
