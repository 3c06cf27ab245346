"""The policies of `examples/`, beside those of the router, on simulated agents."""

import json
from pathlib import Path

import pytest

from kvmesh.cli.main import run

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_learning_policy_finds_out_that_cached_blocks_save_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    file = tmp_path / "figures.json"
    policies = "learning_policy:LearnsTtft,round-robin"
    arguments = ["demo", "--limit", "200", "--speed", "4", "--compare", policies]
    assert run(["simulate", *arguments, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    shares = [each["cache"]["cached_share"] for each in figures]
    assert shares[0] > shares[1] + 0.05
