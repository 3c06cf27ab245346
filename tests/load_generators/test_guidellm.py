"""GuideLLM measures a live mesh. It has no user agent of its own: a header marks its load test."""

import json
from pathlib import Path

import pytest
from load_generators.conftest import TOOLS, run
from support.tap import Tap
from support.up import Up
from support.wait import eventually

from kvmesh.demo import model_dir

pytestmark = [pytest.mark.load_generators, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_every_api_is_measured_without_an_error(mesh: Up, tmp_path: Path, path: str) -> None:
    backend = {
        "kind": "openai_http",
        "target": mesh.url,
        "model": "kvmesh-demo",
        "request_format": path,
        "extras": {"headers": {"x-kvmesh-load-test": "1"}},
    }
    async with Tap().listening(mesh.options) as tap:
        await run(
            TOOLS / "guidellm" / "bin" / "guidellm",
            *("run", "--backend", json.dumps(backend)),
            *("--tokenizer", f"kind=huggingface_auto,model={model_dir()}"),
            *("--data", "kind=synthetic_text,prompt_tokens=300,output_tokens=20"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", "kind=max_requests,count=8"),
            *("--output", f"kind=json,path={tmp_path / 'result.json'}", "--disable-console"),
            folder=tmp_path,
        )
        await eventually(lambda: len(tap.outcomes) >= 8)
    [found] = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0)
    output = found["metrics"]["output_token_count"]["successful"]
    assert output["mean"] == 20
    assert {outcome.agent for outcome in tap.outcomes} == {"http-client"}
    assert all(outcome.load_test for outcome in tap.outcomes)
