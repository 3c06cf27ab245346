"""The rows of the speed tables: loads on a running fleet, whoever has made it.

A row measures CPU of processes, latencies and memory. Each answer's number of tokens is checked on
the wire. All texts come from a seed, so two fleets get the same requests.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import uvloop
from chat_load import Connection, Timing, chat, drive, prompts, user
from common import Interval, cpu_seconds, measure, median, percentile, pss_bytes

CONCURRENCY = 32
SHORT = 28  # words of a prompt of 36 tokens
STEP_MS = 10.0  # of engines that pace their streams
FAST_MS = 0.001
IDLE_S = 3.0
SETTLED = 0.2  # share of a core: a fleet that uses less has started
TURN = 600
ROLES = ("router", "indexer", "worker", "nats")


class TokenError(Exception):
    """An answer has other tokens than the request asked for."""


class Fleet(Protocol):
    """Running processes by name, which begins with the role, and the address that they serve."""

    @property
    def url(self) -> str: ...
    @property
    def pids(self) -> Mapping[str, int]: ...
    @property
    def started_s(self) -> float:
        """Seconds from the start of the first process to the first answer."""
        ...


class Side(Protocol):
    """One of two systems that are compared."""

    name: str

    def running(self, step_ms: float) -> AbstractContextManager[Fleet]:
        """A fleet of separate processes whose engines take `step_ms` for a step."""
        ...

    def started(self) -> AbstractContextManager[Fleet]:
        """A fleet started as its user would on one machine, once it has answered."""
        ...


class Figure(NamedTuple):
    value: float
    unit: str


@dataclass
class Sample:
    """Figures of one run of a row by name, and the tokens of its prompts."""

    figures: dict[str, Figure] = field(default_factory=dict)
    prompt_tokens: int = 0

    def add(self, name: str, value: float, unit: str) -> None:
        self.figures[name] = Figure(value, unit)

    def add_cpu(self, used: Interval, factor: float, unit: str) -> None:
        """CPU of the frontend and of all processes; that of the others as parts of it."""
        self.add("frontend", used.of("frontend") * factor, f"CPU {unit}")
        self.add("all", used.total_s * factor, f"CPU {unit}")
        for role in ROLES:
            if any(name.startswith(role) for name in used.cpu_s):
                self.add(f"  {role}", used.of(role) * factor, f"CPU {unit}")

    def count(self, timings: list[Timing], answers: int, tokens: int) -> None:
        """Check that there are so many answers of so many tokens. Raises TokenError."""
        counts = [timing.output_tokens for timing in timings]
        if counts != [tokens] * answers:
            wrong = sorted(set(counts) - {tokens})
            raise TokenError(f"{len(counts)} answers of {wrong} not {answers} of {tokens} tokens")
        self.prompt_tokens += sum(timing.prompt_tokens for timing in timings)


class Load:
    """Requests for one fleet, the same for each fleet with the same seed."""

    def __init__(self, fleet: Fleet, seed: int, scale: float) -> None:
        self.fleet = fleet
        self._seeds = itertools.count(seed * 1000)
        self._scale = scale

    def number(self, full: int) -> int:
        """So many requests of a full run as this run sends."""
        return max(int(full * self._scale), 4)

    def texts(self, tokens: int) -> Iterator[str]:
        return prompts(next(self._seeds), tokens)

    def bodies(self, tokens: int, count: int, output: int, stream: bool) -> list[bytes]:
        texts = itertools.islice(self.texts(tokens), count)
        return [chat(user(text), output, stream) for text in texts]

    def cpu(self, bodies: list[bytes], concurrency: int) -> tuple[Interval, list[Timing]]:
        """Send the requests; the use of all processes, and the answers."""
        with measure(self.fleet.pids) as used:
            timings = uvloop.run(drive(self.fleet.url, iter(bodies), concurrency))
        return used, timings


def short(load: Load) -> Sample:
    sample, count = Sample(), load.number(600)
    used, timings = load.cpu(load.bodies(SHORT, count, 16, False), CONCURRENCY)
    sample.count(timings, count, 16)
    sample.add_cpu(used, 1e3 / count, "ms")
    return sample


def streams(full: int, tokens: int, concurrency: int) -> Callable[[Load], Sample]:
    """A row of streams; its figures are per token."""

    def row(load: Load) -> Sample:
        sample, count = Sample(), max(load.number(full), concurrency)
        used, timings = load.cpu(load.bodies(SHORT, count, tokens, True), concurrency)
        sample.count(timings, count, tokens)
        sample.add_cpu(used, 1e6 / count / tokens, "µs")
        return sample

    return row


def first_token(load: Load) -> Sample:
    sample, count = Sample(), load.number(120)
    connection = Connection(load.fleet.url)
    bodies = load.bodies(SHORT, count, 4, True)
    with measure(load.fleet.pids) as used:
        timings = [connection.stream(body) for body in bodies]
    connection.close()
    sample.count(timings, count, 4)
    firsts = [timing.first_s * 1e3 for timing in timings]
    sample.add("p50", median(firsts), "ms")
    sample.add("p99", percentile(firsts, 0.99), "ms")
    sample.add_cpu(used, 1e3 / count, "ms")
    return sample


def unseen(load: Load) -> Sample:
    sample, count = Sample(), load.number(16)
    used, timings = load.cpu(load.bodies(4192, count, 1, True), 1)
    sample.count(timings, count, 1)
    sample.add_cpu(used, 1e3 / count, "ms")
    return sample


def agent_turns(size: int) -> Callable[[Load], Sample]:
    """A row of turns that each repeat a conversation of `size` tokens and add 600."""

    def row(load: Load) -> Sample:
        sample, count = Sample(), load.number(8)
        turns = conversation(load.texts(TURN // 2), size, count)
        connection = Connection(load.fleet.url)
        cold = connection.stream(next(turns))
        with measure(load.fleet.pids) as used:
            timings = [connection.stream(body) for body in turns]
        connection.close()
        sample.count([cold, *timings], count + 1, 8)
        sample.add_cpu(used, 1e3 / count, "ms")
        sample.add("first token", median(t.first_s * 1e3 for t in timings), "ms")
        sample.add("first token of the first prompt", cold.first_s * 1e3, "ms")
        return sample

    return row


def conversation(texts: Iterator[str], size: int, turns: int) -> Iterator[bytes]:
    """Requests: `size` tokens, then `turns` more, each longer by an answer and a message.

    `texts` have half as many tokens as a turn adds.
    """
    messages = [{"role": "system", "content": "You are a careful engineer." + next(texts)}]
    roles = itertools.cycle(["user", "assistant"])
    while len(messages) * TURN // 2 < size or messages[-1]["role"] != "user":
        messages.append({"role": next(roles), "content": next(texts)})
    yield chat(messages, 8, True)
    for _ in range(turns):
        messages += [{"role": next(roles), "content": next(texts)} for _ in range(2)]
        yield chat(messages, 8, True)


def beside_cold(load: Load) -> Sample:
    """Gaps of eight paced streams while cold prompts of 40K tokens come one by one."""
    paced = load.bodies(SHORT, 8, 256, True)
    cold = load.bodies(40_000, 30, 1, True)
    prompt_timings: list[Timing] = []

    async def both() -> list[Timing]:
        beside = asyncio.create_task(drive(load.fleet.url, iter(paced), 8))
        await asyncio.sleep(0.2)
        while cold and not beside.done():
            prompt_timings.extend(await drive(load.fleet.url, iter([cold.pop()]), 1))
        return await beside

    sample, timings = Sample(), uvloop.run(both())
    Sample().count(prompt_timings, len(prompt_timings), 1)  # each side has time for its own number
    sample.count(timings, 8, 256)
    gaps = [gap for timing in timings for gap in timing.gaps_s[2:-1]]
    sample.add("gap p99", percentile(gaps, 0.99) * 1e3, "ms")
    return sample


def start_up(load: Load) -> Sample:
    """Start, idle use and memory of a fleet that runs alone."""
    sample, fleet = Sample(), load.fleet
    cpu = _settled_cpu(fleet)
    sample.add("start, first answer", fleet.started_s, "s")
    sample.add("start, all", cpu, "CPU s")
    with measure(fleet.pids) as used:
        time.sleep(IDLE_S)
    sample.add("idle, all", used.total_s / IDLE_S * 1e3, "CPU ms/s")
    warm(load)
    connection = Connection(fleet.url)
    turns = conversation(load.texts(TURN // 2), 40_000, 1)
    sample.count([connection.stream(body) for body in turns], 2, 8)
    connection.close()
    memory = {name: pss_bytes(pid) / (1 << 20) for name, pid in fleet.pids.items()}
    sample.add("memory, all", sum(memory.values()), "MiB")
    return sample


def _settled_cpu(fleet: Fleet) -> float:
    """CPU seconds of all processes once they rest."""
    used = 0.0
    while True:
        before, used = used, sum(map(cpu_seconds, fleet.pids.values()))
        if used - before < SETTLED / 2:
            return used
        time.sleep(0.5)


def warm(load: Load) -> None:
    """Have every process run its code for short and streamed requests."""
    for bodies in (load.bodies(SHORT, 300, 16, False), load.bodies(SHORT, 32, 16, True)):
        load.cpu(bodies, CONCURRENCY)


class Row(NamedTuple):
    """A load, the fleet that it needs, and the most that a figure may be of the peer's."""

    name: str
    fleet: Literal["fast", "paced", "started"]
    measure: Callable[[Load], Sample]
    targets: Mapping[str, float]


ROWS = (
    Row("fleet", "started", start_up, {}),
    Row("short request", "fast", short, {"frontend": 0.8, "all": 0.9}),
    Row("streamed token", "fast", streams(64, 256, CONCURRENCY), {"frontend": 0.2, "all": 0.25}),
    Row("token of 512 streams", "fast", streams(512, 64, 512), {}),
    Row("first token", "fast", first_token, {"p50": 1.0, "p99": 0.7}),
    Row("unseen 4.2K prompt", "fast", unseen, {}),
    Row("agent turn of 40K", "fast", agent_turns(40_000), {"frontend": 0.5, "all": 0.8}),
    Row("agent turn of 128K", "fast", agent_turns(120_000), {"frontend": 0.5, "all": 0.8}),
    Row("paced token", "paced", streams(32, 128, CONCURRENCY), {}),
    Row("beside cold 40K prompts", "paced", beside_cold, {}),
)


def chosen(names: str) -> list[Row]:
    """The rows whose name begins with one of some names, separated by commas; all for none."""
    wanted = tuple(names.split(","))
    return [row for row in ROWS if row.name.startswith(wanted)]
