"""`vllm bench serve` measures a live mesh; `make vllm` makes its environment."""

import json
from pathlib import Path

import pytest
from load_generators.conftest import VLLM, run
from support.tap import Tap
from support.up import Up
from support.wait import eventually

from kvmesh.demo import model_dir

pytestmark = [pytest.mark.load_generators, pytest.mark.asyncio(loop_scope="module")]
PYTHON = VLLM / "bin" / "python"
# `vllm bench serve` of the CPU build, whose command looks for a package of another name
BENCH = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai-chat", "/v1/chat/completions"),
        ("openai", "/v1/completions"),
        ("openai-responses", "/v1/responses"),
    ],
)
async def test_every_api_is_measured_without_an_error(
    mesh: Up, tmp_path: Path, backend: str, path: str
) -> None:
    async with Tap().listening(mesh.options) as tap:
        await run(
            PYTHON,
            *("-c", BENCH, "--backend", backend, "--base-url", mesh.url, "--endpoint", path),
            *("--model", "kvmesh-demo", "--tokenizer", str(model_dir()), "--ignore-eos"),
            *("--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "20"),
            *("--num-prompts", "8", "--max-concurrency", "2", "--disable-tqdm"),
            *("--save-result", "--result-filename", str(tmp_path / "result.json")),
            folder=tmp_path,
        )
        await eventually(lambda: len(tap.outcomes) >= 8)
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["completed"], found.get("failed", 0)) == (8, 0)
    assert found["total_output_tokens"] == 8 * 20
    measured = tap.outcomes[-8:]
    assert {outcome.agent for outcome in measured} == {"vllm-bench"}
    assert all(outcome.load_test for outcome in measured)
