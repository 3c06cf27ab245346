"""Single faults; and planted defects, which the simulation must detect."""

import contextlib

import pytest
from support.simulation import faults
from support.simulation.world import simulate

from kvmesh.bus.messages import Refused, SeqEvent, SeqFree
from kvmesh.bus.streams.publisher import ACK_TIMEOUT_S, KvPublisher
from kvmesh.bus.streams.reader import StreamReader
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.router.model_router import ModelRouter
from kvmesh.router.state.active_sequences import ActiveSequences
from kvmesh.router.waiting.ticket import Ticket


@pytest.mark.parametrize("fault", faults.ALL)
def test_the_mesh_heals_from_each_fault_alone(fault: str) -> None:
    result = simulate(1, frozenset({fault}))
    assert not result.broken, str(result)


def test_an_indexer_survives_a_stale_read_of_its_stored_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(faults.RATES, "stale", 1.0)
    result = simulate(1, frozenset({"stale"}))
    assert not result.broken, str(result)
    assert any("no snapshot, retrying" in line for line in result.log)


def test_an_event_without_resend_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def store_once(self: KvPublisher, payload: bytes, quiet: bool) -> bool:
        with contextlib.suppress(Exception):
            await self._bus.store(self._subject, payload, ACK_TIMEOUT_S)
        return True

    monkeypatch.setattr(KvPublisher, "_store", store_once)
    monkeypatch.setitem(faults.RATES, "loss", 0.05)
    assert any("are not on the stream" in text for text in broken({"loss"}))


def test_an_unread_message_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamReader, "_start_over", lambda self, fault: None)
    assert any("has not read the stored message" in text for text in broken({"rewind", "recreate"}))


def test_a_second_other_reply_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = ModelRouter._reply

    def twice(self: ModelRouter, ticket: Ticket) -> None:
        reply(self, ticket)
        ticket.result = Refused(code="unavailable", reason="another reply")
        reply(self, ticket)

    monkeypatch.setattr(ModelRouter, "_reply", twice)
    assert any("replies to one query" in text for text in broken(set()))


def test_a_request_left_in_the_ledger_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActiveSequences, "expire", lambda self, now: [])
    assert any("active requests" in text for text in broken({"vanish"}))


def test_an_unfreed_request_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = SequenceEventPublisher.event

    def event(self: SequenceEventPublisher, model: str, event: SeqEvent) -> None:
        if not isinstance(event, SeqFree):
            publish(self, model, event)

    monkeypatch.setattr(SequenceEventPublisher, "event", event)
    assert any("without events" in text for text in broken(set()))


def broken(only: set[str], most: int = 6) -> list[str]:
    """The violations that the first failing seed shows."""
    found = (simulate(seed, frozenset(only)).broken for seed in range(most))
    return next(filter(None, found), [])
