"""AIPerf measures a live mesh: its figures are the mesh's, and the mesh learns nothing from it."""

import json
from pathlib import Path
from typing import Any

import pytest
from load_generators.conftest import PROCESSES, TOOLS, run
from support.mesh import scrape
from support.tap import Tap
from support.up import Up
from support.wait import eventually

from kvmesh.demo import model_dir

pytestmark = [pytest.mark.load_generators, pytest.mark.asyncio(loop_scope="module")]


async def aiperf(
    up: Up, folder: Path, *arguments: str, tokenizer: str = str(model_dir()), **variables: str
) -> dict[str, Any]:
    """Run `aiperf profile`; returns its JSON export."""
    await run(
        TOOLS / "aiperf" / "bin" / "aiperf",
        *("profile", "--model", "kvmesh-demo", "--url", up.url, "--tokenizer", tokenizer),
        *("--streaming", "--use-server-token-count", "--ui-type", "none"),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(folder)),
        *arguments,
        folder=folder,
        **variables,
    )
    found: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return found


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
async def test_every_api_is_measured_without_an_error(mesh: Up, tmp_path: Path, api: str) -> None:
    async with Tap().listening(mesh.options) as tap:
        found = await aiperf(
            mesh,
            tmp_path,
            *("--endpoint-type", api, "--request-count", "8", "--concurrency", "2"),
            *("--synthetic-input-tokens-mean", "300", "--output-tokens-mean", "20"),
        )
        await eventually(lambda: len(tap.outcomes) >= 8)
    assert found["request_count"]["avg"] == 8
    assert not found["error_summary"]
    if api != "responses":  # AIPerf reads no usage of an answer that ends at its limit
        assert found["usage_completion_tokens"]["avg"] == 20
        sent = sum(outcome.prompt_tokens for outcome in tap.outcomes)
        assert found["usage_prompt_tokens"]["sum"] == sent
    assert {outcome.agent for outcome in tap.outcomes} == {"aiperf"}
    assert all(outcome.load_test for outcome in tap.outcomes)
    assert all(decision.hints.load_test for decision in tap.decisions)


async def test_a_trace_with_sessions_is_replayed_with_exact_hits(mesh: Up, tmp_path: Path) -> None:
    """Each turn continues the one before: AIPerf sends the rows of a session as increments."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"session_id": "s", "timestamp": 0, "hash_ids": [1, 2]},
        {"session_id": "s", "delay": 100, "hash_ids": [3]},
        {"session_id": "s", "delay": 100, "hash_ids": [4]},
    ]
    lengths = [{"input_length": 512 * len(row["hash_ids"]), "output_length": 16} for row in rows]  # type: ignore[arg-type]
    trace.write_text(
        "".join(json.dumps(row | length) + "\n" for row, length in zip(rows, lengths, strict=True))
    )
    async with Tap().listening(mesh.options) as tap:
        found = await aiperf(
            mesh,
            tmp_path,
            *("--endpoint-type", "chat", "--input-file", str(trace)),
            *("--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        )
        await eventually(lambda: len(tap.outcomes) >= 3)
    assert not found["error_summary"]
    first, second, third = sorted(tap.outcomes, key=lambda outcome: outcome.prompt_tokens)
    assert first.prompt_tokens >= 1024
    assert second.prompt_tokens > first.prompt_tokens + 512
    block = tap.decisions[0].block_size
    for earlier, later in ((first, second), (second, third)):
        assert later.cached_tokens >= (earlier.prompt_tokens // block - 1) * block
    cached = sum(outcome.cached_tokens for outcome in tap.outcomes)
    assert found["usage_prompt_cache_read_tokens"]["sum"] == cached
    assert {outcome.session for outcome in tap.outcomes} != {""}


async def test_a_long_trace_is_replayed_with_a_tokenizer_of_the_hub_s_cache(
    mesh: Up, tmp_path: Path
) -> None:
    """AIPerf refuses a folder once a trace has ten prompts: the docs' way round it."""
    entry = tmp_path / "hub" / "models--local--model"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("main")
    (entry / "snapshots").mkdir()
    (entry / "snapshots" / "main").symlink_to(model_dir())
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 20 * n, "input_length": 1024, "output_length": 8, "hash_ids": [0, n + 1]}
        for n in range(20)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = await aiperf(
        mesh,
        tmp_path,
        *("--endpoint-type", "chat", "--input-file", str(trace)),
        *("--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        tokenizer="local/model",
        HF_HUB_CACHE=str(entry.parent),
        HF_HUB_OFFLINE="1",
    )
    assert found["request_count"]["avg"] == 20
    assert not found["error_summary"]


async def test_the_metrics_of_every_process_are_scraped_without_a_complaint(
    mesh: Up, tmp_path: Path
) -> None:
    ports = range(mesh.metrics_port, mesh.metrics_port + PROCESSES)
    urls = [f"http://127.0.0.1:{port}/metrics" for port in ports if _listens(port)]
    assert len(urls) >= 4
    await aiperf(
        mesh,
        tmp_path,
        *("--endpoint-type", "chat", "--request-count", "4"),
        *("--synthetic-input-tokens-mean", "100", "--output-tokens-mean", "5"),
        *("--server-metrics", *urls),
    )
    found = json.loads((tmp_path / "server_metrics_export.json").read_text())
    assert set(urls) <= set(found["summary"]["endpoints_successful"])
    log = (tmp_path / "logs" / "aiperf.log").read_text()
    assert "non-finite" not in log


def _listens(port: int) -> bool:
    try:
        return bool(scrape(port))
    except OSError:
        return False
