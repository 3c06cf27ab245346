"""Messages as `kvmesh tail` shows them: one line each, or whole as JSON."""

import json
import struct

import msgspec
import pytest

from kvmesh.bus import messages as m
from kvmesh.bus.messages import KvLayout
from kvmesh.cli.messages.decoding import Undecodable, decode, plain
from kvmesh.cli.messages.one_line import summarise
from kvmesh.cli.messages.tailing import LineFormat


def packed(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


CANDIDATE = m.Candidate(
    instance="w-1",
    worker="w",
    rank=0,
    overlap=[2, 0, 0, 0],
    prefill=1,
    decode=4,
    requests=1,
    cost=5,
)
BATCH = m.KvBatch(
    worker="w",
    instance="w-1",
    rank=0,
    first=7,
    time=0.0,
    events=[
        m.Stored(0, None, packed(0xAB << 56, 2), packed(3, 4), 5),
        m.Stored(1, 0xCD << 56, packed(9), packed(8)),
        m.Removed(0, packed(1, 2, 3)),
        m.Cleared(),
        m.Cleared(2),
    ],
)
SEQUENCES = m.SeqBatch(
    "r-1",
    [
        m.SeqAdd("q1", "w-1", 0, packed(1, 2, 3), 50, 2, 9, 0.0),
        m.SeqPrefilled("q1"),
        m.SeqProgress("q1", 32),
        m.SeqFree("q1"),
    ],
)
DECISION = m.Decision(
    request="q1",
    model="demo",
    time=0.0,
    router="r-1",
    policy="kv",
    chosen=CANDIDATE,
    candidates=[CANDIDATE, CANDIDATE],
    tokens=50,
    sequence_hashes=packed(1, 2, 3),
    max_tokens=9,
    wait_s=0.001,
    attempt=1,
)
OUTCOME = m.Outcome(
    request="q1",
    instance="w-1",
    time=0.0,
    cached_tokens=32,
    output_tokens=9,
    ttft_s=0.05,
    total_s=1.0,
    finish="stop",
)
WORK = m.Work(
    request="q1",
    frontend="f-1",
    tokens=struct.pack("<3I", 1, 2, 3),
    sampling=m.Sampling(max_tokens=9),
)
WAKE = m.Wake(model="demo", frontend="f-1", request="q1", waiting=2, tokens=30, time=0.0)
SCALING = m.ScalingDecision(
    model="demo",
    time=0.0,
    planner="p-1",
    reason="workers 2 → 3",
    changed=True,
    pools={"workers": m.PoolPlan(ready=2, starting=0, before=2, wanted=3, startup_s=9.0)},
    signals={"arrivals_per_s": 1.5, "forecast_per_s": 2.0, "waiting_requests": 4.0},
    kept={"ttft p95=2s": 0.5},
)
LOAD = m.Load(
    instance="w-1",
    rank=0,
    running=3,
    waiting=1,
    active_blocks=10,
    cached_blocks=20,
    total_blocks=100,
    prefill_tokens=7,
    steps=1,
    prompt_tokens=1,
    cached_tokens=1,
    output_tokens=1,
    requests=1,
)
STARTING = m.Starting(
    instance="w-1",
    model="demo",
    engine="torch",
    phase="weights",
    since=0.0,
    started=0.0,
    phases=[m.Phase("process", 0.1), m.Phase("imports", 9.0)],
)
CARD = m.Instance(instance="w-1", role=m.Role.WORKER, name="w", version="0.1.0", started=0.0)


@pytest.mark.parametrize(
    ("kind", "message", "shown"),
    [
        ("kv", BATCH, ["w-1#0 7…11", "+2 G1 root → [ab000000…00000000]", "-3 G1", "and 1 more"]),
        ("kv", m.KvBatch("w", "w-1", 1, 0, 0.0, [m.Cleared()]), ["w-1#1 0  cleared everything"]),
        ("seq", SEQUENCES, ["r-1: add q1 on w-1 (overlap 2 of 3 blocks)", "progress q1 32 tokens"]),
        (
            "seq",
            m.SeqBatch("r-1", [m.SeqWait("q1", "r-1", "", 0, "gold", 0.0, 900, 0.0, 1.0)]),
            ["wait q1 in r-1 (900 tokens to prefill)"],
        ),
        ("route", DECISION, ["q1 → w#0", "kv: cost 5.0", "2/0/0/0 of 3 blocks", "attempt 2"]),
        ("route", OUTCOME, ["q1 ✓ stop on w-1", "32 cached, 9 out", "50.0 ms", "1000.0 ms"]),
        ("work", WORK, ["q1 from f-1", "prompt 3, at most 9"]),
        ("ctl", m.Cancel("q1"), ["cancel q1"]),
        ("ctl", m.Resend("q1", 4), ["resend q1 4"]),
        ("ctl", m.Drain(), ["drain"]),
        ("wake", WAKE, ["2 waiting in f-1, 30 tokens to prefill", "first q1"]),
        (
            "scaling",
            SCALING,
            ["demo workers 2→3", "1.50/s, forecast 2.00/s", "4 waiting  workers 2 → 3"],
        ),
        ("load", LOAD, ["#0  3 running, 1 waiting", "10 active, 20 cached of 100"]),
        (
            "starting",
            STARTING,
            ["w-1  starts demo on torch: weights after process 0.1 s, imports 9.0 s"],
        ),
        ("index", m.OverlapQuery([packed(1, 2), packed(3)]), ["2 prompts, 3 blocks"]),
        ("instances", CARD, ["w-1 up  worker w 0.1.0"]),
        (
            "out",
            m.StepOutput("w-1", [m.Chunk("q1", 0, [1, 2]), m.Chunk("q2", 3, [4], "stop")]),
            ["w-1: 3 tokens of 2 requests", "finished q2 stop"],
        ),
        (
            "router",
            m.RouteRequest(
                request="q1",
                model="demo",
                sequence_hashes=b"",
                tokens=5,
                max_tokens=9,
                deadline_s=1,
            ),
            ["q1  prompt 5, at most 9"],
        ),
    ],
)
def test_a_message_in_one_line(kind: str, message: object, shown: list[str]) -> None:
    line = summarise(decode(kind, m.encode(message)))
    assert "\n" not in line
    assert [part for part in shown if part not in line] == []


def test_damaged_and_unknown_messages_are_shown_too() -> None:
    damaged = decode("kv", b"\xc1")
    assert isinstance(damaged, Undecodable)
    assert "undecodable, 1 bytes" in summarise(damaged)
    assert summarise(decode("future", m.encode({"a": [1, 2]}))) == '{"a":[1,2]}'
    assert len(summarise(decode("future", m.encode("x" * 1000)))) < 200


def test_json_has_names_types_and_whole_hashes() -> None:
    shown = plain(BATCH)
    assert isinstance(shown, dict)
    assert shown["type"] == "KvBatch"
    first = shown["events"][0]
    expected = {
        "type": "Stored",
        "tier": 0,
        "parent": None,
        "engine": ["ab00000000000000", "0000000000000002"],
        "local": ["0000000000000003", "0000000000000004"],
        "salt": "0000000000000005",
    }
    assert {name: first[name] for name in expected} == expected
    assert shown["events"][1]["parent"] == "cd00000000000000"
    work = plain(WORK)
    assert isinstance(work, dict)
    assert work["tokens"] == [1, 2, 3]


def test_json_has_the_names_that_callers_know() -> None:
    hints = m.Hints(session="0a1b\x1fs1", parent_session="0a1b\x1f\x1fc2", tenant="red")
    shown = plain(msgspec.structs.replace(DECISION, hints=hints))
    assert isinstance(shown, dict)
    names = [shown["hints"][field] for field in ("session", "parent_session", "tenant")]
    assert names == ["s1", "c2", "red"]
    wait = m.SeqWait("q1", "router-0", "", 0, "red\x1fbatch", 0.0, 1, 0.0, 1.0)
    waiting = plain(wait)
    assert isinstance(waiting, dict)
    assert waiting["fair_class"] == "red/batch"


def test_a_line_of_the_tail() -> None:
    data = m.encode(m.Cancel("q1"))
    text = LineFormat(as_json=False, colour=False).line(
        0.25, "kvm.ns.ctl.w-1", "ctl", ("w-1",), data
    )
    assert text.endswith(".250 ctl   w-1  cancel q1")
    coloured = LineFormat(as_json=False, colour=True).line(
        0.25, "s", "kv", ("demo",), m.encode(BATCH)
    )
    assert "\x1b[32mkv    demo\x1b[0m" in coloured
    line = LineFormat(as_json=True, colour=True).line(0.25, "kvm.ns.ctl.w-1", "ctl", ("w-1",), data)
    assert json.loads(line) == {
        "time": 0.25,
        "subject": "kvm.ns.ctl.w-1",
        "message": {"type": "Cancel", "request": "q1"},
    }


def test_json_can_encode_every_message() -> None:
    for message in (BATCH, SEQUENCES, DECISION, OUTCOME, WORK, LOAD, CARD, SCALING):
        msgspec.json.encode(plain(message))


def test_requests_of_workers_to_their_kvbm() -> None:
    hashes = struct.pack("<3Q", 0xAB << 56, 2, 0xCD << 56)
    offer = m.Offer(1, 1, bytes(48), hashes, hashes, 5, request="q1")
    fetch = m.Fetch(1, "q1", 2, bytes(48), hashes, hashes, 5, 0.0, 0.0, 1.5)
    lines = [
        summarise(decode("kvbm", m.encode(ask))) for ask in (offer, fetch, m.Lend(bytes(32), 8192))
    ]
    assert lines == [
        "offer blocks 1 to 3 of q1 [00000000…cd000000]",
        "fetch q1 3 blocks, 2 held [ab000000…cd000000], waits 1.5 s",
        "lend 2 blocks of 8192 bytes",
    ]


def test_messages_between_kvbms() -> None:
    layout = KvLayout(weights="", dtype="uint8", item_bytes=1, block_size=4, layers=[])
    prepare = m.Prepare("m", layout, bytes(48), 0.0, 0.0, 0.25)
    claims = [m.ClaimAnnouncement("kv-1", 7, digests, 30.0) for digests in (bytes(32), b"")]
    assert summarise(decode("kvbm", m.encode(prepare))) == "prepare 3 blocks of m"
    assert [summarise(decode("computing", m.encode(claim))) for claim in claims] == [
        "kv-1 #7 computes a prompt of 2 digests",
        "kv-1 #7 ended its computation",
    ]
