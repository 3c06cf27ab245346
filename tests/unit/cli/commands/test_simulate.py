"""`kvmesh simulate`, and the fleet of `kvmesh simulate live`."""

import json
from argparse import ArgumentTypeError
from pathlib import Path

import msgspec
import pytest

from kvmesh.bus.messages import Capacity, Instance, ModelCard, NodeStore, Role
from kvmesh.cli.arguments import moment
from kvmesh.cli.commands.workloads import live
from kvmesh.cli.flags import FlagParser, add_flags, settings_flags
from kvmesh.cli.main import main
from kvmesh.cli.registry import NOT_SIMULATED
from kvmesh.settings import load, options
from kvmesh.settings.schema import KvbmSettings
from kvmesh.simulator.engines import Fleet
from kvmesh.simulator.nodes.options import like_live

FEW = ("simulate", "demo", "--limit", "40", "--block-size", "64")


def simulate(*more: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*FEW, *more])
    return int(ended.value.code or 0)


def test_policies_side_by_side_and_all_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("json", "html", "perfetto")
    files = [tmp_path / f"figures.{kind}" for kind in kinds]
    flags = [f"--{kind}={tmp_path}/figures.{kind}" for kind in kinds]
    assert simulate("--policy", "kv,session", *flags) == 0
    out = capsys.readouterr().out
    assert "session" in out
    assert "share of ideal" in out
    assert [run["policy"] for run in json.loads(files[0].read_text())] == ["kv", "session"]
    assert "<svg" in files[1].read_text()
    assert json.loads(files[2].read_text())["traceEvents"]


def test_the_answer_ends_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--policy", "round-robin,kv", "--workers", "3") == 0
    *_, best, other, hint = capsys.readouterr().out.splitlines()
    assert best.startswith("kv, 3 workers: ")
    assert "of the prompt tokens are hits (ideal" in best
    assert other.startswith("round-robin, 3 workers: ")
    assert hint.startswith("--planner-ttft p95=2s adds")


def test_promises_are_counted_and_sized(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--workers", "3", "--planner-ttft", "p95=30s") == 0
    *_, _, kept = capsys.readouterr().out.splitlines()
    assert kept == ("kv: keeps ttft p95=30s for 100.0% of the requests; 1 worker would be enough")
    assert simulate("--group", "1", "--group", "1", "--planner-ttft", "p95=30s") == 0
    assert "kvmesh plan size searches" in capsys.readouterr().out
    assert simulate("--planner-ttft", "soon") == 2
    assert "expected [MODEL/][CLASS:]QUANTILE=TIME" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_affect_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    assert simulate("--json", "/dev/full", "--html", str(report)) == 2
    captured = capsys.readouterr()
    assert "share of ideal" in captured.out
    assert captured.err.startswith("kvmesh simulate: cannot write /dev/full: ")
    assert "</html>" in report.read_text()


def test_repairs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [0]}
    trace.write_text(f"{json.dumps(row)}\nnonsense\n")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(trace), "--repair"])
    assert not ended.value.code
    assert capsys.readouterr().err == "repaired 1×: dropped the line\n"


def test_groups_of_different_engines(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    groups = ("--group", "1:serves=prefill,speedup=2", "--group", "2:serves=decode,blocks=2048")
    assert simulate(*groups, "--json", str(file)) == 0
    (run,) = json.loads(file.read_text())
    assert [worker["name"] for worker in run["workers"]] == ["worker-0", "worker-1", "worker-2"]
    assert run["failed"] == 0


def test_nodes_share_their_memory_and_disk(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    sizes = ("--kvbm-host-bytes", str(1 << 30), "--kvbm-disk-path", str(tmp_path / "none"))
    assert simulate("--nodes", "2", *sizes, "--kvbm-peers", "--json", str(file)) == 0
    (run,) = json.loads(file.read_text())
    assert run["tiers"]["moved"]["from_engines"] > 0
    assert not (tmp_path / "none").exists()
    assert simulate("--nodes", "2", "--kvbm-retention", "nonsense") == 2


def worker(name: str, serves: str, blocks: int, ranks: int = 1) -> Instance:
    return Instance(
        instance=f"{name}-x",
        role=Role.WORKER,
        name=name,
        version="1",
        started=0.0,
        serves=serves,
        model=ModelCard(name="m", context=1000, block_size=32, files=""),
        capacity=Capacity(
            blocks=blocks,
            max_sequences=8,
            max_batched_tokens=512,
            dp_ranks=ranks,
            tier_blocks=[blocks * 2],
        ),
    )


def default_fleet(*flags: str) -> Fleet:
    """The fleet of `simulate live` beside three live workers."""
    parser = FlagParser()
    live.configure(parser)
    add_flags(parser, "", ("router", "mock"), NOT_SIMULATED)
    arguments = parser.parse_args(flags)
    cards = [
        worker("b", "decode", 400),
        worker("p", "prefill", 300),
        worker("a", "decode", 400, ranks=2),
    ]
    return live.fleet(arguments, load(None, {}, settings_flags(arguments)), cards)


def test_live_engines_equal_the_live_ones() -> None:
    decode, prefill = default_fleet()
    assert (decode.count, decode.serves, decode.core.blocks) == (3, "decode", 400)
    assert (prefill.count, prefill.serves, prefill.core.blocks) == (1, "prefill", 300)
    assert decode.core.limits.block_size == 32
    assert decode.core.limits.max_sequences == 8
    assert decode.core.tiers.host_blocks == 800


def test_live_flags_override_the_cards() -> None:
    decode, prefill = default_fleet("--mock-blocks", "77", "--block-size", "64")
    assert (decode.core.blocks, prefill.core.blocks) == (77, 77)
    assert decode.core.limits.block_size == 64
    assert decode.core.limits.max_sequences == 8


def live_kvbm(node: str, blocks: list[int], key: str = "") -> Instance:
    return Instance(
        instance=f"kv-{node}",
        role=Role.KVBM,
        name="kv",
        version="1",
        started=0.0,
        node=node,
        store=NodeStore(directory="", tier_bytes=[], tier_blocks=blocks, key=key),
    )


def test_live_nodes_have_the_sizes_of_the_smallest_live_one() -> None:
    cards = [live_kvbm("a", [100, 50, 0], "k"), live_kvbm("b", [80, 90, 0], "k")]
    found = like_live(KvbmSettings(), cards, 1 << 20)
    assert (found.host_bytes, found.disk_bytes) == (80 << 20, 50 << 20)
    assert found.disk_path is not None
    assert found.peers
    own = like_live(KvbmSettings(host_bytes=7 << 20), cards, 1 << 20, {"host_bytes"})
    assert (own.host_bytes, own.disk_bytes) == (7 << 20, 50 << 20)
    assert like_live(KvbmSettings(), [], 1 << 20) == KvbmSettings()
    tiered = msgspec.structs.replace(worker("w", "aggregated", 10), node="b")
    assert live.used_kvbms([*cards, tiered], [tiered]) == [cards[1]]


def test_there_are_no_flags_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert {(option.section, option.key) for option in options()} >= NOT_SIMULATED
    assert simulate("--mock-dp-ranks", "2") == 2
    assert "unknown flag --mock-dp-ranks" in capsys.readouterr().err


def test_no_time_is_too_long_ago_to_be_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="neither"):
        moment("99999999999d")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--group", "2:size=4"), "size"),
        (("--group", "many"), "many"),
        (("--group", "2", "--workers", "3"), "exclude"),
        (("--group", "2:serves=prefill"), "decode"),
        (("--fault", "explode:1@3"), "explode"),
        (("--fault", "die:4@3"), "worker 4 cannot die at 3 s: it does not exist"),
        (("--fault", "join:0@3"), "has joined already"),
        (("--fault", "die:0@3", "--fault", "leave:0@5"), "cannot leave"),
        (("--fault", "die:0@nan"), "nan"),
        (("--policy", "best"), "best"),
        (("--event-loss", "1.5"), "event loss"),
        (("--event-delay", "-1"), "event delay"),
        (("--sync-delay", "nan"), "sync delay"),
        (("--speed", "nan"), "speed"),
        (("--speed", "0"), "speed"),
        (("--group", "0"), "at least one router and one worker"),
    ],
)
def test_invalid_options_are_rejected_in_one_line(
    flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvmesh simulate: ")
    assert reason in line


def test_the_head_names_the_trace_and_its_ideal_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,4\n")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(trace), "--workers", "2"])
    assert not ended.value.code
    head = capsys.readouterr().out.splitlines()[:2]
    assert head[0] == "trace.csv: Azure's LLM inference trace, 1 request in 1 session, 0.00 h"
    assert head[1].startswith("ideal share 0.0% with infinite memory, 0.0% with this fleet's ")


def test_engines_follow_the_settings_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those without an effect are named, and none is ignored in silence."""
    file, found = tmp_path / "settings.toml", tmp_path / "figures.json"

    def figures_with(text: str) -> str:
        file.write_text(f"[worker]\n{text}\n")
        with pytest.raises(SystemExit):
            main(["simulate", "demo", "--limit=9", "--config", str(file), "--json", str(found)])
        return found.read_text()

    usual = figures_with("block_size = 16")
    assert "without effect" not in capsys.readouterr().err
    assert figures_with("block_size = 64\nsession_idle_s = 60") != usual
    assert "without effect" not in capsys.readouterr().err
    assert figures_with("context = 9\nmax_waiting = 9") == usual
    assert "[worker] settings without effect here: context, max_waiting" in capsys.readouterr().err
