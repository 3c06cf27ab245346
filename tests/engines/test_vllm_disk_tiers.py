"""Files below the host memory of vLLM's own offloading: their tier in the index and in answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import prompt
from support.vllm import SIZE, VllmRun, sequence, work
from support.vllm_offload import host_copies
from support.wait import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
HOST_BLOCKS = 12
BLOCK_BYTES = 32_768  # of the tiny model


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with host_copies(tmp_path_factory.mktemp("plugins")):
        yield


@pytest.mark.parametrize(("locality", "tier"), [(None, 2), ("REMOTE", 3)])
async def test_blocks_that_only_files_have_are_known_served_and_told(
    copies: None, tiny_model: Path, tmp_path: Path, locality: str | None, tier: int
) -> None:
    files: dict[str, Any] = {"type": "fs", "root_dir": str(tmp_path / "kv")}
    if locality is not None:
        files["locality"] = locality
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": HOST_BLOCKS * BLOCK_BYTES,
            "secondary_tiers": [files],
        },
    }
    arguments = ["num_gpu_blocks_override=17", f"kv_transfer_config={json.dumps(transfer)}"]
    run = await VllmRun.start(tiny_model, *arguments)
    try:
        tokens = prompt(5 * SIZE + 1, 1000)
        hashes = set(sequence(tokens)[:5])
        await run.run_works(work("first", tokens, 1))
        await eventually(lambda: hashes <= run.sink.sequences_below(tier), what="the files")
        for number in range(8):
            await run.run_works(work(f"flood {number}", prompt(200, 2000 + number), 1))
        await eventually(lambda: not hashes & run.sink.sequences_below(1), what="host evictions")
        await run.run_works(work("again", tokens, 1))
        expected = [0] * 4
        expected[tier] = 5 * SIZE
        assert run.sink.tiers("again") == expected
    finally:
        await run.engine.close()
