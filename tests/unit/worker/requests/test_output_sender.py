"""Plain tokens share messages while more of them follow; all others leave at once."""

import asyncio
from collections.abc import Sequence

import pytest
from support.wait import eventually

from kvmesh.bus.messages import Chunk, Tokens
from kvmesh.worker.requests import output_sender
from kvmesh.worker.requests.output_sender import OutputSender

Sent = list[tuple[str, list[Tokens]]]


def sender(sent: Sent) -> OutputSender:
    def send(frontend: str, chunks: Sequence[Tokens]) -> None:
        sent.append((frontend, list(chunks)))

    return OutputSender(send)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_the_first_tokens_leave_at_once_and_followers_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_sender, "GAP_S", 0.2)
    sent: Sent = []
    sending, began = sender(sent), now()
    sending.add({"f": [Tokens("a", 0, [1])], "g": [Tokens("b", 0, [2])]}, began)
    assert len(sent) == 2
    for offset in range(1, 4):
        sending.add({"f": [Tokens("a", offset, [offset]), Tokens("c", offset, [9])]}, began)
    assert len(sent) == 2
    await eventually(lambda: len(sent) == 3)
    assert sent[2] == ("f", [Tokens("a", 1, [1, 2, 3]), Tokens("c", 1, [9, 9, 9])])
    sending.add({"f": [Tokens("a", 4, [4])]}, now() + 1)
    assert sent[3] == ("f", [Tokens("a", 4, [4])])


async def test_ends_take_along_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_sender, "GAP_S", 60.0)
    sent: Sent = []
    sending, began = sender(sent), now()
    sending.add({"f": [Tokens("a", 0, [1])]}, began)
    sending.add({"f": [Tokens("a", 1, [2])], "g": [Tokens("b", 0, [5])]}, began)
    assert len(sent) == 1
    end = Chunk("a", 2, [3], "stop")
    sending.add({"f": [end]}, began)
    assert sent[1:] == [("f", [Tokens("a", 1, [2]), end]), ("g", [Tokens("b", 0, [5])])]
    sending.add({"f": [Tokens("c", 7, [1])]}, began)
    sending.add({"f": [Tokens("c", 9, [1])]}, began)  # a gap stays one
    sending.add({"f": [Chunk("c", 10, [], "abort")]}, began)
    assert sent[3] == ("f", [Tokens("c", 7, [1]), Tokens("c", 9, [1]), Chunk("c", 10, [], "abort")])
