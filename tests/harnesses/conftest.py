"""A mesh as a user starts it, whose mock engine follows a script, and a client connected to it."""

import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from harnesses.recording import record
from harnesses.scripts import SCRIPT
from harnesses.tours import script as tour_script
from support.harness import KEY, LimitedMesh, Recorder, Workspace
from support.shares import Turn, assert_as_replayed, table, turns
from support.tap import Tap
from support.up import Up

MakeMesh = Callable[..., Up]
SMALL = 24576
StartTour = Callable[..., Awaitable["Touring"]]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("script") / "script.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in SCRIPT))
    return file


@pytest.fixture(scope="session")
def make_mesh(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeMesh]:
    """Start meshes of two workers, with further flags; they are stopped at the end."""
    started: list[Up] = []

    def start(*flags: str) -> Up:
        folder = tmp_path_factory.mktemp("up")
        up = Up(folder, "--workers", "2", "--mock-script", str(script), *flags)
        started.append(up)
        up.start()
        return up

    yield start
    for up in started:
        up.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(make_mesh: MakeMesh) -> Up:
    up = make_mesh("--mock-speedup", "20")
    await up.ready()
    return up


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small(make_mesh: MakeMesh) -> Up:
    """A mesh whose context just fits the clients' first prompt."""
    up = make_mesh("--mock-speedup", "20", "--worker-context", str(SMALL))
    await up.ready()
    return up


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def limited(make_mesh: MakeMesh, tmp_path_factory: pytest.TempPathFactory) -> LimitedMesh:
    """A mesh that requires a key, which allows one request at a time."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    secret = hashlib.sha256(KEY.encode()).hexdigest()
    file.write_text(f'[[key]]\nname = "one"\nsha256 = "{secret}"\nconcurrency = 1\n')
    up = make_mesh("--frontend-keys-file", str(file), "--mock-speedup", "2")
    await up.ready()
    return LimitedMesh(up.url)


@pytest_asyncio.fixture(loop_scope="session")
async def recorder(mesh: Up) -> AsyncIterator[Recorder]:
    """The client's endpoint; at the end, assert that the mesh has logged no complaint."""
    before = len(mesh.lines)
    async with Recorder(mesh.url).listening() as recorder:
        yield recorder
    complaints = [line for line in mesh.lines[before:] if " W " in line or " E " in line]
    assert not complaints


@pytest_asyncio.fixture(loop_scope="session")
async def tap(mesh: Up) -> AsyncIterator[Tap]:
    async with Tap().listening(mesh.options) as tap:
        yield tap


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@dataclass
class Touring:
    """A client's workspace, its endpoint, and the bus."""

    name: str
    workspace: Workspace
    recorder: Recorder
    tap: Tap

    @property
    def url(self) -> str:
        return self.recorder.url

    async def assert_as_replayed(self) -> list[Turn]:
        """Assert that each turn found cached what an exact replay would have found."""
        found = await turns(self.recorder.requests, self.tap)
        print(self.name, table(found), sep="\n")
        if folder := os.environ.get("KVMESH_RECORD_SESSIONS"):
            record(Path(folder), self.name, found, self.tap, self.workspace)
        assert_as_replayed(found)
        return found


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the workspaces in which clients tour."""
    return tmp_path_factory.mktemp("places")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tour_mesh(places: Path, make_mesh: MakeMesh) -> Up:
    """A mesh whose script knows the folders, and which computes nothing before it is asked."""
    file = places / "script.jsonl"
    entries = tour_script(lambda name: places / name / "repository")
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    flags = ("--mock-speedup", "20", "--frontend-speculative-prefill", "off")
    up = make_mesh("--mock-script", str(file), *flags)
    await up.ready()
    return up


@pytest_asyncio.fixture(loop_scope="session")
async def start_tour(tour_mesh: Up, places: Path) -> AsyncIterator[StartTour]:
    async with AsyncExitStack() as stack:

        async def start(name: str, place: str = "") -> Touring:
            shutil.rmtree(places / (place or name), ignore_errors=True)  # of another API's tour
            recorder = Recorder(tour_mesh.url, tenant=name)
            await stack.enter_async_context(recorder.listening())
            tap = await stack.enter_async_context(Tap().listening(tour_mesh.options))
            return Touring(name, Workspace(places / (place or name)), recorder, tap)

        yield start
