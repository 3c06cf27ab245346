"""The pure parts of a worker: intake, transcripts, the event backlog, model folders, metrics."""

import json
import os
import subprocess
import sys
import tempfile
from array import array
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.bus.messages import (
    Capacity,
    Chunk,
    Cleared,
    Guided,
    KvEvent,
    Load,
    Removed,
    Sampling,
    Stored,
    Work,
)
from kvmesh.bus.publisher import MAX_EVENT_BLOCKS, Backlog
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.default_model import default_model
from kvmesh.worker.engine import EngineError, EngineInfo, OutputDelta
from kvmesh.worker.health.stall_watch import StallWatch
from kvmesh.worker.metrics import LoadCollector
from kvmesh.worker.model_card import card_labels, model_card
from kvmesh.worker.model_folder import DEFAULT_CONTEXT, model_context
from kvmesh.worker.requests.admission import rejection_reason
from kvmesh.worker.requests.output_buffer import OutputBuffer
from kvmesh.worker.scratch import PREFIX, ScratchFolder

INFO = EngineInfo(
    name="mock",
    version="1",
    context=100,
    block_size=16,
    capacity=Capacity(blocks=10, max_sequences=4, max_batched_tokens=64, dp_ranks=2),
    adapters=["lora"],
)
GUIDED = Guided(kind="regex", value="aaaaaaaaa")


def work(count: int = 10, **fields: object) -> Work:
    base = Work(
        request="a",
        frontend="f",
        tokens=array("I", range(count)).tobytes(),
        sampling=Sampling(max_tokens=20),
    )
    return replace(base, **fields)


def test_good_work_passes() -> None:
    assert rejection_reason(work(), INFO, 9) == ""
    assert rejection_reason(work(99), INFO, 9) == ""
    assert rejection_reason(work(rank=1, adapter="lora", generated=9), INFO, 9) == ""
    assert rejection_reason(work(sampling=Sampling(max_tokens=20, guided=GUIDED)), INFO, 9) == ""


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (work(tokens=b"123"), "3 bytes"),
        (work(0), "empty"),
        (work(100), "100 tokens"),
        (work(generated=10), "10 generated"),
        (work(generated=-1), "-1 generated"),
        (work(30, generated=20), "max_tokens is 20"),
        (work(rank=2), "no rank 2"),
        (work(rank=-1), "no rank -1"),
        (work(adapter="other"), "no adapter other"),
        (work(sampling=Sampling(max_tokens=20, guided=GUIDED)), "its regex has 9 bytes, of at"),
    ],
)
def test_bad_work_is_named(item: Work, reason: str) -> None:
    assert reason in rejection_reason(item, INFO, 8)


def test_transcripts_number_tokens_and_sort_them_by_frontend() -> None:
    kept = OutputBuffer()
    kept.start(work())
    kept.start(work(request="b", frontend="g", generated=4))
    first = kept.add([OutputDelta("a", [1, 2], cached=[16]), OutputDelta("b", [9])], 0.0)
    assert first == {"f": [Chunk("a", 0, [1, 2], cached=[16])], "g": [Chunk("b", 4, [9])]}
    second = kept.add([OutputDelta("a", [3], finish="stop"), OutputDelta("stranger", [1])], 0.0)
    assert second == {"f": [Chunk("a", 2, [3], "stop")]}
    assert kept.add([OutputDelta("a", [4])], 0.0) == {}
    assert kept.live == ["b"]
    assert kept.live_count == 1
    kept.drop("b")
    kept.drop("b")
    assert kept.live_count == 0


def test_transcripts_give_again_what_is_asked_for() -> None:
    kept = OutputBuffer()
    kept.start(work(generated=4))
    kept.add(
        [OutputDelta("a", [5, 6, 7], cached=[0], logprobs=[{5: 0.0}, {6: 0.0}, {7: 0.0}])], 0.0
    )
    again = Chunk("a", 5, [6, 7], cached=[0], logprobs=[{6: 0.0}, {7: 0.0}])
    assert kept.output_from("a", 5) == ("f", again)
    for early in (0, 4):
        found = kept.output_from("a", early)
        assert found is not None
        assert (found[1].offset, found[1].tokens) == (4, [5, 6, 7])
    assert kept.output_from("b", 0) is None


def test_what_an_engine_does_not_tell_is_told_for_it() -> None:
    kept = OutputBuffer()
    kept.start(work(), ["unsupported"], "unsupported")
    kept.start(work(request="b"), ["unsupported"], "unsupported")
    first = kept.add([OutputDelta("a", [1], cached=[0]), OutputDelta("b", [1], cached=[0])], 0.0)[
        "f"
    ]
    assert [(chunk.retention, chunk.decode) for chunk in first] == [(["unsupported"], None)] * 2
    last = [OutputDelta("a", [2], "stop"), OutputDelta("b", [2], "stop", decode="clipped")]
    assert [chunk.decode for chunk in kept.add(last, 0.0)["f"]] == ["unsupported", "clipped"]
    again = [found[1] for name in "ab" if (found := kept.output_from(name, 0)) is not None]
    assert [chunk.decode for chunk in again] == ["unsupported", "clipped"]


def test_ended_transcripts_are_kept_for_a_while() -> None:
    kept = OutputBuffer(retain_s=5)
    kept.start(work())
    kept.add([OutputDelta("a", [1], finish="stop")], 100.0)
    kept.add([], 105.0)
    assert "a" in kept
    kept.add([], 105.1)
    assert "a" not in kept


def removed(count: int) -> Removed:
    return Removed(0, bytes(8 * count))


def test_a_backlog_is_taken_in_order_and_in_bounded_batches() -> None:
    backlog = Backlog()
    events: list[KvEvent] = [removed(n) for n in (1, 100, 1, 1, 500, 1)]
    backlog.extend(events)
    batches = []
    while batch := backlog.take(1000):
        batches.append(batch)
    assert [event for batch in batches for event in batch] == events
    assert [len(batch) for batch in batches] == [4, 1, 1]
    assert backlog.bytes == 0


def test_a_huge_event_is_told_in_parts_that_follow_each_other() -> None:
    hashes = array("Q", range(1, 2 * MAX_EVENT_BLOCKS + 6)).tobytes()
    backlog = Backlog()
    backlog.extend([Stored(1, None, hashes, hashes, 7), Removed(1, hashes)])
    events = backlog.take(1 << 30)
    stored = [event for event in events if isinstance(event, Stored)]
    assert [len(event.engine) // 8 for event in stored] == [MAX_EVENT_BLOCKS] * 2 + [5]
    assert [event.parent for event in stored] == [None, MAX_EVENT_BLOCKS, 2 * MAX_EVENT_BLOCKS]
    assert [(event.tier, event.salt) for event in stored] == [(1, 7), (1, 0), (1, 0)]
    assert b"".join(event.engine for event in stored) == hashes
    assert b"".join(event.local for event in stored) == hashes
    removed = [event for event in events if isinstance(event, Removed)]
    assert b"".join(event.engine for event in removed) == hashes


def test_an_overflowed_backlog_is_empty_until_it_starts_anew() -> None:
    backlog = Backlog()
    backlog.extend([removed(10)])
    backlog.overflow()
    assert (backlog.take(1000), backlog.bytes) == ([], 0)
    backlog.extend([Cleared()])
    assert backlog.take(1000) == [Cleared()]


@pytest.mark.parametrize(
    ("config", "tokenizer", "context"),
    [
        ({"max_position_embeddings": 4096}, {}, 4096),
        ({"text_config": {"max_position_embeddings": 8192}}, {}, 8192),
        ({}, {"model_max_length": 2048}, 2048),
        ({}, {"model_max_length": 10**30}, DEFAULT_CONTEXT),
        ({"max_position_embeddings": 0}, {}, DEFAULT_CONTEXT),
        ([], {}, DEFAULT_CONTEXT),
    ],
)
def test_the_context_comes_from_the_folder(
    tmp_path: Path, config: object, tokenizer: object, context: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert model_context(tmp_path) == context


def test_a_damaged_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config\.json"):
        model_context(tmp_path)


def test_dialects_come_from_settings_then_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "kvmesh.json").write_text('{"tool_parser": "hermes", "reasoning_parser": "qwen3"}')
    card = model_card(WorkerSettings(tool_parser="mistral"), folder, INFO, "digest")
    assert (card.name, card.tool_parser, card.reasoning_parser) == ("tiny", "mistral", "qwen3")
    assert model_card(WorkerSettings(served_name="shown"), tmp_path, INFO, "digest").name == "shown"


def test_labels_are_pairs() -> None:
    assert card_labels(WorkerSettings(labels=["zone=a", "gpu=h200=2"])) == {
        "zone": "a",
        "gpu": "h200=2",
    }
    for bad in ("zone", "=a"):
        with pytest.raises(EngineError, match="key=value"):
            card_labels(WorkerSettings(labels=[bad]))


LOAD = Load(
    instance="w",
    rank=1,
    running=3,
    waiting=2,
    active_blocks=40,
    cached_blocks=50,
    total_blocks=100,
    prefill_tokens=7,
    steps=11,
    prompt_tokens=12,
    cached_tokens=13,
    output_tokens=14,
    requests=15,
    step_s=0.5,
)


def test_an_engine_with_work_and_no_steps_is_stalled() -> None:
    watch = StallWatch(3)
    idle = replace(LOAD, rank=0, running=0, waiting=0)
    for steps in (1, 1, 1, 2, 2, 2):
        watch.observe([idle, replace(LOAD, steps=steps)])
    assert not watch.stalled
    watch.observe([idle, replace(LOAD, steps=2)])
    assert watch.stalled


def test_an_engine_that_had_a_rest_is_not_stalled() -> None:
    watch = StallWatch(3)
    for running in (1, 1, 1, 0, 1, 1, 1):
        watch.observe([replace(LOAD, running=running, waiting=0)])
    assert not watch.stalled


def test_metrics_show_the_load_of_each_rank() -> None:
    registry = CollectorRegistry()
    registry.register(LoadCollector(lambda: [LOAD]))
    text = generate_latest(registry).decode()
    for line in (
        'kvmesh_worker_running{rank="1"} 3.0',
        'kvmesh_worker_step_seconds{rank="1"} 0.5',
        'kvmesh_worker_output_tokens_total{rank="1"} 14.0',
        'kvmesh_worker_requests_total{rank="1"} 15.0',
    ):
        assert line in text


def test_a_mock_needs_no_model_and_a_random_one_is_made_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as made:
        assert (default_model("mock", made) / "tokenizer.json").is_file()
        with pytest.raises(EngineError, match="the vllm engine needs a model: --model FOLDER"):
            default_model("vllm", made)
        assert not list(tmp_path.iterdir())
        pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
        folder = default_model("torch", made)
        assert list(folder.glob("*.safetensors"))
    assert not folder.parent.exists()


def test_what_a_killed_worker_has_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}unlocked").mkdir()
    with ScratchFolder() as living:
        code = (
            "import os, signal\n"
            "from kvmesh.worker.scratch import ScratchFolder; made = ScratchFolder()\n"
            "(made.path / 'weights').write_text('…'); print(made.path, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        killed = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        left = Path(killed.stdout.strip())
        assert (left / "weights").exists()
        with ScratchFolder() as other:
            assert not left.exists()
            assert living.path.exists()
        assert not other.path.exists()
    assert not living.path.exists()
