"""`kvmesh workload`: each action on the command line."""

import json
from pathlib import Path

import pytest

from kvmesh.cli.main import run

ROW = {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [{**ROW, "timestamp": 100 * i, "hash_ids": [0, 1, 10 + i]} for i in range(30)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_read_checks_and_converts(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert run(["workload", "read", str(trace), "-o", str(out)]) == 0
    assert "30 requests in 30 sessions" in capsys.readouterr().out
    assert run(["workload", "read", str(out)]) == 0


@pytest.mark.parametrize("action", ["read", "synthesize"])
def test_what_is_read_is_not_written_over(
    action: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(trace)
    assert run(["workload", action, str(trace), "-o", str(link)]) == 2
    assert f"{link} is what is read: name another file" in capsys.readouterr().err
    assert trace.read_bytes() == before


@pytest.mark.parametrize("name", ["full.jsonl", "full.json", "full.csv"])
def test_a_full_disk_is_told_with_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / name
    full.symlink_to("/dev/full")
    assert run(["workload", "generate", "demo", "--sessions", "2", "-o", str(full)]) == 2
    assert f"cannot write {full}: No space left on device" in capsys.readouterr().err


def test_read_refuses_by_line_and_repairs_with_a_count(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text() + '{"timestamp": 1}\n')
    assert run(["workload", "read", str(trace)]) == 2
    assert f"kvmesh workload: {trace}:31: " in capsys.readouterr().err
    assert run(["workload", "read", str(trace), "--repair"]) == 0
    captured = capsys.readouterr()
    assert "repaired 1×: dropped the line" in captured.err
    assert "30 requests" in captured.out


def test_analyze_prints_and_writes_figures(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert run(["workload", "analyze", str(trace), "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "ideal hit rate  82.5%" in out
    assert "30 to" not in out
    written = json.loads(figures.read_text())
    assert written["ideal_hit_share"] == pytest.approx(29 * 1024 / (30 * 1200))
    assert written["block_size"] == 512


def test_synthesize_writes_a_trace(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "more.jsonl"
    options = ["--num-requests", "90", "--prompt-len-multiplier", "0.5"]
    assert run(["workload", "synthesize", str(trace), "-o", str(out), *options]) == 0
    assert "wrote 90 requests" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 90


def test_a_synthetic_trace_has_the_requested_block_size(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "more.jsonl"
    assert run(["workload", "synthesize", str(trace), "-o", str(out), "--block-size", "64"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["block_size"] for row in rows} == {64}
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 64) for row in rows)
    assert run(["workload", "read", str(out)]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["--num-requests", "0"],
        ["--osl-multiplier", "none"],
        ["--prefix-len-multiplier", "inf"],
        ["--speedup-ratio", "nan"],
        ["--max-isl", "-3"],
    ],
)
def test_synthesize_names_a_bad_option(
    trace: Path, tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "more.jsonl")
    assert run(["workload", "synthesize", str(trace), "-o", out, *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_generate_lists_prints_describes_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["workload", "generate"]) == 0
    assert "coding-agents" in capsys.readouterr().out
    assert run(["workload", "generate", "demo", "--print"]) == 0
    own = tmp_path / "own.toml"
    own.write_text(capsys.readouterr().out)
    assert run(["workload", "generate", str(own), "--sessions", "3"]) == 0
    assert "rounds per session" in capsys.readouterr().out
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file in files:
        arguments = ["generate", "demo", "--sessions", "3", "--seed", "4", "-o", str(file)]
        assert run(["workload", *arguments]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_profile_serves_as_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workload", "analyze", "demo"]) == 0
    assert "423 in 50 sessions" in capsys.readouterr().out


def test_an_action_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["workload"])
    assert ended.value.code == 2
    assert "ACTION" in capsys.readouterr().err


def test_analyze_shows_two_workloads_side_by_side(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, figures = tmp_path / "more.json", tmp_path / "figures.json"
    options = ["-o", str(other), "--num-requests", "60"]
    assert run(["workload", "synthesize", str(trace), *options]) == 0
    against = ["--against", str(other), "--json", str(figures)]
    assert run(["workload", "analyze", str(trace), *against]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["requests", "30", "60", "+100.0%"] in [line.split() for line in lines]
    written = {each["name"]: each for each in json.loads(figures.read_text())}
    share = written["ideal share"]
    assert share["second"] == pytest.approx(share["first"], rel=0.05)
    missing = ["--against", str(tmp_path / "missing.json")]
    assert run(["workload", "analyze", str(trace), *missing]) == 2
