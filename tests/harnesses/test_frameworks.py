"""Small programs of agent frameworks: five calls of a tool, an answer, and one more turn."""

import shutil
from pathlib import Path

import pytest
from harnesses.conftest import StartTour
from support.harness import INSTALLED

pytestmark = [pytest.mark.agents, pytest.mark.asyncio(loop_scope="session")]
DRIVERS = Path(__file__).with_name("drivers")
PYTHON = INSTALLED.parents[1] / "py/bin/python"
CASES = [
    *(("ai_sdk.mjs", kind) for kind in ("compatible", "openai", "openai-stored", "anthropic")),
    *(("agents_sdk.py", kind) for kind in ("chat", "chat-replay", "responses")),
    *(("lang_chain.py", kind) for kind in ("chat", "responses", "anthropic")),
    *(("pydantic_ai_agent.py", kind) for kind in ("chat", "responses", "anthropic")),
    ("strands_agent.py", "chat"),
    *(("lite_llm.py", kind) for kind in ("openai", "hosted_vllm", "anthropic")),
]
LAST = ["It will rain (framework-5).", "It will rain tomorrow, too (framework-6)."]


@pytest.mark.parametrize(("driver", "kind"), CASES, ids=str)
async def test_a_framework(start_tour: StartTour, driver: str, kind: str) -> None:
    name = driver.partition(".")[0]
    tour = await start_tour(f"{name}-{kind}", "framework")
    program = tour.workspace.home / driver
    shutil.copy(DRIVERS / driver, program)
    (tour.workspace.home / "node_modules").symlink_to(INSTALLED.parent)
    interpreter = Path(shutil.which("node") or "") if driver.endswith(".mjs") else PYTHON
    done = await tour.workspace.run(interpreter, str(program), kind, tour.url, env={})
    assert done.status == 0, done
    assert [line for line in done.output.splitlines() if line] == LAST, done
    await tour.assert_as_replayed()
