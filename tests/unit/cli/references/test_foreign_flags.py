"""Flags of other projects name what does the same here."""

import pytest

from kvmesh.cli.main import run
from kvmesh.cli.references.foreign_flags import FOREIGN, foreign_variables
from kvmesh.settings import options


def test_every_option_that_a_foreign_flag_names_exists() -> None:
    known = {(option.section, option.key) for option in options()}
    assert {found for found in FOREIGN.values() if not isinstance(found, str)} <= known


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("up --router-replica-sync", "routers always share their state"),
        ("up --router-snapshot-threshold 9", "here --indexer-snapshot-threshold"),
        ("router --router-snapshot-threshold 9", "--snapshot-threshold of `kvmesh indexer`"),
        ("up --kv-overlap-score-weight=1", "here --router-prefill-weight"),
        ("router --kv-overlap-score-weight 1", "here --prefill-weight"),
        ("router --router-reset-states", "--reset-states of `kvmesh indexer`"),
        ("up --router-mode kv", "here --router-policy"),
        ("up --worker-eviction lru", "recency orders eviction"),
        ("kvbm --eviction lru", "recency orders eviction"),
        ("worker --kv_cache_block_size 16", "here --block-size"),
        ("worker --tensor-parallel-size 2", "--vllm-args tensor_parallel_size="),
        ("up --workerss 2", "did you mean --workers?"),
    ],
)
def test_a_foreign_flag_is_answered(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command.split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_variables_of_dynamo_are_answered() -> None:
    env = {
        "DYN_ROUTER_MODE": "kv",
        "DYN_HTTP_PORT": "1",
        "DYN_KV_CACHE_BLOCK_SIZE": "16",
        "DYN_TOOL_CALL_PARSER": "hermes",
        "DYN_ROUTER_REPLICA_SYNC": "1",
        "DYN_UNHEARD_OF": "1",
        "KVMESH_ROUTER_POLICY": "kv",
    }
    assert foreign_variables(env) == [
        "DYN_HTTP_PORT has no effect: here KVMESH_FRONTEND_PORT",
        "DYN_KV_CACHE_BLOCK_SIZE has no effect: here KVMESH_WORKER_BLOCK_SIZE",
        "DYN_ROUTER_MODE has no effect: here KVMESH_ROUTER_POLICY",
        f"DYN_ROUTER_REPLICA_SYNC has no effect: {FOREIGN['--router-replica-sync']}",
        "DYN_TOOL_CALL_PARSER has no effect: here KVMESH_WORKER_TOOL_PARSER",
    ]
