"""A mesh as a user starts it, and the load generators in their own environments."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.up import Up

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / os.environ.get("READERS", ".readers")
VLLM = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm")
PROCESSES = 8  # of the mesh; each but the frontend has a port of metrics


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    up = Up(
        tmp_path_factory.mktemp("up"),
        *("--workers", "2", "--mock-speedup", "20"),
        metrics=PROCESSES,
    )
    up.start()
    await up.ready()
    yield up
    up.close()


async def run(program: Path, *arguments: str, folder: Path, **variables: str) -> str:
    """Run a load generator in `folder`, with `variables` of its environment.

    Returns its output, or fails with it.
    """
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        cwd=folder,
        env={**os.environ, "OPENAI_API_KEY": "none", **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text[-4000:]
    return text
