"""The compose file's profile `engine`, run as processes: vLLM with the block manager beside it."""

import json
from pathlib import Path

import pytest
from support.compose import nats_of_compose, running, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
START_S = 400
IMAGE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


async def test_the_profile_serves_a_model_folder(tiny_model: Path, tmp_path: Path) -> None:
    variables = {
        "KVMESH_ALLOW_ANONYMOUS": "true",
        "KVMESH_ENGINE_MODEL": str(tiny_model),
        "KVMESH_VLLM_ARGS": "enforce_eager=true,num_gpu_blocks_override=128,max_model_len=1024",
        "KVMESH_BLOCK_SIZE": "32",
        "KVMESH_KVBM_HOST_BYTES": "67108864",
    }
    names = ("indexer", "router", "kvbm", "engine", "frontend")
    image = {**IMAGE, "HOME": str(tmp_path)}
    with (
        nats_of_compose(tmp_path) as nats,
        running(names, nats, tmp_path, variables, **image) as containers,
    ):
        await serve(containers, START_S)
    log = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines if line.get("log") != "access"]
    assert any("serving tiny on vllm" in message for message in messages)
    assert not any("violation" in message for message in messages)
