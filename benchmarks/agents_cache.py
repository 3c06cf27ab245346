"""Cached tokens of recorded sessions of real agents, beside an exact replay and another build.

Replays the sessions of `data/agent_sessions` against a mesh with mock engines, whose script gives
the recorded answers. "Possible" is what a turn would find cached if its prompt began with the
previous prompt and the answer just as it was generated, in whole blocks. The mesh computes nothing
speculatively, so all that is not cached is computed for the request. `--build` names another
checkout with its `.venv`, whose mesh replays the same sessions in turns with this one.
"""

import argparse
import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop
from agent_sessions import BLOCK, Replay, ReplayError, Session, script, sessions
from chat_load import prompts
from common import Report, cpu_seconds, parser
from local_mesh import Mesh, kind_of, running_mesh

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import Decision, MessageDecoder, Outcome

WORKERS, SPEEDUP = 1, 1000.0  # with one worker no placement decides what is cached
PATIENCE_S = 60.0
HERE, THERE = "this build", "the other build"
CPU_SESSION = "claude"
PADDING = 10_000  # tokens, with which its turns have about 30,000
LIMIT = aiohttp.ClientTimeout(total=PATIENCE_S)


@dataclass(frozen=True)
class Figures:
    """Sums over a session, in tokens.

    `cached`, `possible` and `later`, the computed ones, are of turns that continue another one.
    """

    turns: int
    prompts: int
    cached: int
    possible: int
    computed: int
    later: int

    @property
    def share(self) -> float:
        return self.cached / self.possible if self.possible else 1.0


class Build:
    """A running mesh of one checkout, and what its bus says of each request."""

    def __init__(self, name: str, mesh: Mesh, bus: Bus) -> None:
        self.name = name
        self.mesh = mesh
        self._bus = bus
        self._outcomes: dict[str, Outcome] = {}
        self._told = asyncio.Event()
        self._runs = itertools.count()

    async def listen(self) -> None:
        decoder = MessageDecoder(Decision | Outcome)
        await self._bus.subscribe(self._bus.subjects.route_all, decoder, self._on_route)
        await self._bus.flush()

    async def _on_route(self, message: Decision | Outcome) -> None:
        if isinstance(message, Outcome):
            self._outcomes[message.request] = message
            self._told.set()

    async def outcome(self, request: str) -> Outcome:
        """Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while request not in self._outcomes:
                self._told.clear()
                await self._told.wait()
        return self._outcomes[request]

    def replay(self, session: Session, padding: str = "") -> Replay:
        """A replay with an empty cache."""
        tenant = f"{session.name}-{next(self._runs)}"
        return Replay(session, self.mesh.url, tenant, padding)

    async def figures(self, session: Session) -> Figures:
        """Replay a session once. Raises ReplayError."""
        async with aiohttp.ClientSession(timeout=LIMIT) as client:
            ids = await self.replay(session).run(client)
        outcomes = [await self.outcome(each) for each in ids]
        pairs = [*zip(session.requests, outcomes, strict=True)]
        later = [each for asked, each in pairs if asked.previous is not None]
        before = [outcomes[asked.previous] for asked, _ in pairs if asked.previous is not None]
        return Figures(
            turns=len(outcomes),
            prompts=sum(each.prompt_tokens for each in outcomes),
            cached=sum(each.cached_tokens for each in later),
            possible=sum(map(_possible, before)),
            computed=sum(map(_computed, outcomes)),
            later=sum(map(_computed, later)),
        )

    async def cpu(self, session: Session, padding: str) -> float:
        """CPU milliseconds of the frontend for each turn but the first of a conversation."""
        first, *later = session.longest()
        replay = self.replay(session, padding)
        async with aiohttp.ClientSession(timeout=LIMIT) as client:
            await self.outcome(await replay.send(client, first))
            pid = self.mesh.pids["frontend"]
            before = cpu_seconds(pid)
            for index in later:
                await self.outcome(await replay.send(client, index))
            used = cpu_seconds(pid) - before
        return used * 1e3 / len(later)


def _computed(outcome: Outcome) -> int:
    return outcome.prompt_tokens - outcome.cached_tokens


def _possible(before: Outcome) -> int:
    """Tokens of whole blocks; the engine has not computed the last token that it generated."""
    return (before.prompt_tokens + before.output_tokens - 1) // BLOCK * BLOCK


@contextlib.asynccontextmanager
async def running(checkouts: dict[str, Path | None]) -> AsyncIterator[list[Build]]:
    """A mesh of each checkout. Raises RuntimeError."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))
        file = folder / "script.jsonl"
        file.write_bytes(script())
        options = {
            "KVMESH_MOCK_SCRIPT": str(file),
            "KVMESH_FRONTEND_SPECULATIVE_PREFILL": "off",
        }
        builds = []
        for name, checkout in checkouts.items():
            kind = kind_of(checkout)
            mesh = stack.enter_context(running_mesh(WORKERS, SPEEDUP, 1, kind, **options))
            bus = await Bus.connect(BusOptions(url=mesh.nats_url), "benchmark")
            stack.push_async_callback(bus.close)
            build = Build(name, mesh, bus)
            await build.listen()
            builds.append(build)
        yield builds


async def compare(builds: list[Build], chosen: list[Session]) -> dict[str, dict[str, Figures]]:
    """The figures of each client and build; the builds take turns in being first.

    A session that the other build refuses is told and left out.
    """
    found: dict[str, dict[str, Figures]] = {}
    for session, order in zip(chosen, itertools.cycle([builds, builds[::-1]]), strict=False):
        figures: dict[str, Figures] = {}
        for build in order:
            try:
                figures[build.name] = await build.figures(session)
            except ReplayError as error:
                if build.name == HERE:
                    raise
                print(f"left out, as {THERE} refuses it: {error}\n")
        if len(figures) == len(builds):
            found[session.name] = figures
    return found


async def cpu(builds: list[Build], pairs: int, report: Report) -> None:
    """The frontend's CPU of one turn, of all builds in turns."""
    (session,) = sessions([CPU_SESSION])
    padding = next(prompts(1, PADDING))
    used: dict[str, list[float]] = {build.name: [] for build in builds}
    for build in builds:
        await build.cpu(session, padding)  # its code and tables are warm afterwards
    for _, order in zip(range(pairs), itertools.cycle([builds, builds[::-1]]), strict=False):
        for build in order:
            used[build.name].append(await build.cpu(session, padding))
    for name, runs in used.items():
        report.add_runs(f"frontend, turn of 30K tokens: {name}", runs, "CPU ms/turn")
    if THERE in used:
        ratios = [a / b for a, b in zip(used[HERE], used[THERE], strict=True)]
        report.add_runs("    ratio, pair by pair", ratios, "", target="≤ 1.0")


def table(found: dict[str, dict[str, Figures]], build: str) -> str:
    """The figures of a build as Markdown."""
    lines = [
        "| client | turns | prompt tokens | cached | possible | share | computed |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for client, by_build in found.items():
        f = by_build[build]
        lines.append(
            f"| {client} | {f.turns} | {f.prompts:,} | {f.cached:,} | {f.possible:,} "
            f"| {f.share:.1%} | {f.computed:,} |"
        )
    return "\n".join(lines)


def sums(found: dict[str, dict[str, Figures]], names: list[str], report: Report) -> float:
    """Add the sums over all clients to the report; the share of this build."""
    for name in names:
        all_of = [by_build[name] for by_build in found.values()]
        share = sum(f.cached for f in all_of) / sum(f.possible for f in all_of)
        report.add(f"cached of possible: {name}", share * 100, "%", target="≥ 99")
        report.add(f"computed: {name}", sum(f.computed for f in all_of), "tokens")
        report.add("    of turns that continue one", sum(f.later for f in all_of), "tokens")
    if THERE in names:
        here, there = (
            sum(by_build[name].computed for by_build in found.values()) for name in (HERE, THERE)
        )
        report.add("computed: ratio", here / there, "", target="≤ 0.75")
    return min(by_build[HERE].share for by_build in found.values())


async def run(options: argparse.Namespace) -> None:
    checkouts = {HERE: None} | ({THERE: options.build} if options.build else {})
    report = Report("Recorded sessions of agents, one mock worker", "")
    async with running(checkouts) as builds:
        found = await compare(builds, sessions(options.clients.split(",")))
        for build in builds:
            print(f"{build.name}:\n\n{table(found, build.name)}\n")
        least = sums(found, list(checkouts), report)
        if options.cpu:
            await cpu(builds, options.cpu, report)
    report.finish(f"agents' cache: every client finds {least:.1%} or more", options.json)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--build", type=Path, metavar="CHECKOUT", help="another one, with .venv")
    arguments.add_argument("--clients", default="", metavar="A,B,…", help="beginnings of names")
    arguments.add_argument("--cpu", type=int, default=0, metavar="N", help="measure CPU, N times")
    uvloop.run(run(arguments.parse_args()))


if __name__ == "__main__":
    main()
