"""A whole mesh whose mock engine follows a script, for tests with real clients."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.harness import Recorder
from support.mesh import Mesh
from support.nats import NatsServer


def call(name: str, **arguments: str | int) -> str:
    """A tool call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


THINK = "<think>\nThe weather has to be looked up.\n</think>\n\n"
CALL, OTHER = (call("get_weather", city=city) for city in ("Oslo", "Bergen"))
SCRIPT = [
    {"match": "Summarize the conversation", "text": "<summary>The user counts towns.</summary>"},
    {"match": "as a summary", "text": "There are two towns."},
    {"match": "in Oslo", "turn": 0, "text": f"{THINK}I look it up.\n{CALL}"},
    {"match": "in Oslo", "turn": 1, "text": "It is sunny in Oslo. Bye."},
    {"match": "Patch the file", "text": call("apply_patch", input="*** Begin Patch\n+a\n")},
    {"match": "[Ll]ook at the sky", "text": call("sky__get_weather", city="Oslo")},
    {"match": "Search a tool", "text": call("ToolSearch", query="select:CronList")},
    {"match": "Book a room", "text": f"I book it.\n{call('book', city='Oslo', days=2)}"},
    {"match": "Compare two towns", "turn": 0, "text": f"{THINK}I compare.\n{CALL}\n{OTHER}"},
    {"match": "Compare two towns", "turn": 1, "text": "Both are sunny."},
    {"match": "Go on for long", "text": "On and on. " * 2000},
    {"match": "Go on", "text": "Gladly."},
]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("script") / "script.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in SCRIPT))
    return file


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(
    nats_server: NatsServer, script: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "50", "KVMESH_MOCK_SCRIPT": str(script)}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    mesh.start_all(workers=2)
    await mesh.ready()
    yield mesh
    mesh.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def url(mesh: Mesh) -> AsyncIterator[str]:
    """The address of the mesh, behind a recorder that replays every stream at the end."""
    async with Recorder(mesh.url).listening() as recorder:
        yield recorder.url
