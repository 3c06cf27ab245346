"""`kvmesh plan size`: kinds with profiles and tiers, scaled traces, and the answer in words."""

import json
from pathlib import Path

import pytest

from kvmesh.cli.main import run
from kvmesh.cli.planning.kinds import BLOCK_SIZE, GIB, tier_choices
from kvmesh.settings.schema import MockSettings
from kvmesh.simulator.options import SimulationError


def test_a_kind_has_the_limits_of_its_profile_and_each_choice_of_tiers() -> None:
    choices = tier_choices(
        ["a:profile=h100-llama-3.1-8b,cost=2,host_gib=0|64,host_gib_cost=0.01,disk_gib=0|500"],
        "",
        MockSettings(),
    )
    assert [each.text for (each,) in choices] == [
        "a", "a with 500 GiB disk", "a with 64 GiB host", "a with 64 GiB host and 500 GiB disk",
    ]  # fmt: skip
    options = choices[2][0].kind.options
    assert options.cost == pytest.approx(2.64)
    assert options.core.blocks == 411_529 // BLOCK_SIZE
    assert options.core.limits.max_batched_tokens == 8192
    assert options.core.tiers.host_blocks == 64 * GIB // (131_072 * BLOCK_SIZE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a:host_gib=x", "host_gib"),
        ("a:host_gib=1|2|3|4|5|6|7|8|9", "host_gib"),
        ("a:memory=3", "memory"),
        ("a:cost=-1", "cost"),
    ],
)
def test_a_bad_kind_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SimulationError, match=reason):
        tier_choices([text], "", MockSettings())


def trace(folder: Path, turns: int = 1) -> Path:
    """Six agents that take turns; the prompts of every `turns` turns in a row are equal."""
    rows = [
        {
            "timestamp": 12_000 * turn + 2000 * agent,
            "input_length": 8192,
            "output_length": 8,
            "hash_ids": [96 * (turn // turns) + 16 * agent + block for block in range(16)],
        }
        for turn in range(5)
        for agent in range(6)
    ]
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_tier_is_bought_if_it_is_cheaper_than_a_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "gpu:blocks=256,speedup=0.2,cost=10,max=8,host_gib=0|16,host_gib_cost=0.01"
    file = trace(tmp_path, turns=5)
    arguments = ["plan", "size", str(file), "--ttft", "p70=800ms", "--kind", kind]
    assert run([*arguments, "--seeds", "1"]) == 0
    output = capsys.readouterr().out
    assert "1 gpu with 16 GiB host: 10.16 per hour, 7,417 per month" in output
    assert "keeps the promises in 1 of 1 runs: ttft p70=0.8s for" in output


def test_a_scaled_trace_needs_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan", "size", str(trace(tmp_path)), "--ttft", "p70=4s", "--seeds", "2", "--profile",
        "a100-llama-3.1-8b",
    ]  # fmt: skip
    costs = []
    for scale in ("1", "6"):
        assert run([*arguments, "--scale", scale]) == 0
        output = capsys.readouterr().out
        line = next(each for each in output.splitlines() if "per hour" in each)
        costs.append(float(line.split(": ")[1].split()[0]))
    assert costs[1] > costs[0]
    assert "the next smaller fleet fails: " in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ttft", "p95=2s", "--profile", "b200"], "b200 is not a performance profile"),
        (["--ttft", "p95=2s", "--kind", "a:profile=no.npz"], "no.npz is not a performance"),
        (["--ttft", "p95=2s", "--developers", "3", "--scale", "2"], "--scale excludes"),
        (["--ttft", "p95=2s", "--kind", "a", "--kind", "a"], "a name is given twice"),
        ([], "name at least one promise"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "size", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_the_shipped_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "profiles"]) == 0
    assert "h100-llama-3.1-8b" in capsys.readouterr().out
    assert run(["plan", "profiles", "h200-llama-3.1-8b"]) == 0
    output = capsys.readouterr().out
    assert "measured 6.5 ms" in output
    assert "source: NVIDIA H200" in output
    assert run(["plan", "profiles", "b200"]) == 2
