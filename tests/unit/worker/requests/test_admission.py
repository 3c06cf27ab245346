"""Admission of work by a worker."""

from array import array

import pytest
from msgspec.structs import replace

from kvmesh.bus.messages import (
    EMBED,
    SCORE,
    Capacity,
    Guided,
    Pooling,
    Sampling,
    Work,
)
from kvmesh.worker.engine import EngineInfo
from kvmesh.worker.requests.admission import rejection_reason

INFO = EngineInfo(
    name="mock",
    version="1",
    context=100,
    block_size=16,
    capacity=Capacity(blocks=10, max_sequences=4, max_batched_tokens=64, dp_ranks=2),
    adapters=["lora"],
)
GUIDED = Guided(kind="regex", value="a" * (512 << 10))
TOO_LARGE = Guided(kind="regex", value="a" * ((512 << 10) + 1))


def work(count: int = 10, **fields: object) -> Work:
    base = Work(
        request="a",
        frontend="f",
        tokens=array("I", range(count)).tobytes(),
        sampling=Sampling(max_tokens=20),
    )
    return replace(base, **fields)


def test_good_work_passes() -> None:
    assert rejection_reason(work(), INFO) == ""
    assert rejection_reason(work(99), INFO) == ""
    assert rejection_reason(work(rank=1, adapter="lora", generated=9), INFO) == ""
    assert rejection_reason(work(sampling=Sampling(max_tokens=20, guided=GUIDED)), INFO) == ""


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
        (work(sampling=Sampling(max_tokens=20, guided=TOO_LARGE)), "the regex has 524289 bytes"),
    ],
)
def test_bad_work_is_named(item: Work, reason: str) -> None:
    assert reason in rejection_reason(item, INFO)


@pytest.mark.parametrize(
    ("pooling", "reason"),
    [
        (Pooling(task=EMBED, lengths=[100, 60]), ""),
        (Pooling(task=EMBED, lengths=[101, 59]), "an input has 101 tokens; at most 100 fit"),
        (Pooling(task=EMBED, lengths=[100]), "the lengths of the inputs"),
        (Pooling(task=EMBED, lengths=[161, -1]), "the lengths of the inputs"),
        (Pooling(task=EMBED, lengths=[]), "the lengths of the inputs"),
        (Pooling(task=EMBED, lengths=[100, 60], seconds=[3]), "the places of the documents"),
        (Pooling(task=EMBED, lengths=[100, 60], seconds=[3, 60]), "the places of the documents"),
        (Pooling(task=SCORE, lengths=[100, 60]), "does not score: its task is embed"),
        (None, "does not generate: its task is embed"),
    ],
)
def test_inputs_to_embed_are_checked(pooling: Pooling | None, reason: str) -> None:
    info = replace(INFO, task=EMBED)
    found = rejection_reason(work(160, pooling=pooling), info)
    assert reason in found
    assert bool(reason) == bool(found)
    assert rejection_reason(work(9, pooling=Pooling(task=EMBED, lengths=[9])), INFO)
