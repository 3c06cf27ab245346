"""Digests of a rank, taken from its engine's dump."""

from array import array
from types import SimpleNamespace
from typing import Any, cast

from kvmesh.bus.messages import Cleared, KvEvent, Removed, Stored
from kvmesh.index.fingerprints import HashRun, digest, fingerprints
from kvmesh.worker.health.rank_digests import RankDigests, digest_reply


def pack(*hashes: int) -> bytes:
    return array("Q", hashes).tobytes()


def test_a_dump_for_a_digest_is_not_published() -> None:
    published: list[KvEvent] = []
    late = Removed(0, pack(9))
    stored = Stored(0, None, pack(1, 2), pack(3, 4))

    def sink(events: list[KvEvent]) -> None:
        if not digests.capture(events):
            published.extend(events)

    def dump(rank: int) -> None:
        sink([late])  # of a step in progress
        sink([Cleared(), stored])

    digests = RankDigests(cast(Any, SimpleNamespace(dump=dump)))
    found = digests.blocks(0)
    assert published == [late]
    assert list(found) == list(fingerprints([HashRun(0, stored.engine, stored.local)]))
    dump(0)
    assert published == [late, late, Cleared(), stored]


def test_fingerprints_are_listed_if_they_fit() -> None:
    found = fingerprints([HashRun(0, pack(1, 2), pack(3, 4))])
    reply = digest_reply(found, 7, listed=True, max_payload=1 << 20)
    assert (reply.blocks, reply.digest, reply.next_event) == (2, digest(found), 7)
    assert len(reply.fingerprints) == 16
    assert digest_reply(found, 7, listed=True, max_payload=16).fingerprints == b""
    assert digest_reply(found, 7, listed=False, max_payload=1 << 20).fingerprints == b""
