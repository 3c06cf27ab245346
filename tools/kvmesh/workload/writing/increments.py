"""Conversations whose later turns are written as what they add to the turn before."""

from collections.abc import Iterator

from msgspec import Struct

from kvmesh.workload.model import Workload
from kvmesh.workload.writing.block_ids import BlockIds


class WrittenTurn(Struct, kw_only=True):
    """A round of a conversation. `start` is the first token that it adds; 0 writes all of it.

    `delay_s` counts from the end of the turn before; None for the first turn.
    """

    index: int
    conversation: str
    start: int = 0
    delay_s: float | None = None

    def tokens(self, workload: Workload) -> int:
        return workload.rounds[self.index].input_tokens - self.start

    def ids(self, workload: Workload, ids: BlockIds) -> list[int]:
        round_ = workload.rounds[self.index]
        return ids.added(round_, self.start) if self.start else ids.of(round_)


class Conversations:
    """Splits sessions where a prompt does not continue the turn before, or does not wait for it.

    `broken` counts the splits of chained turns. `longer` counts turns behind an answer that the
    recorded prompts leave out: a client that resends what it received includes it.
    """

    def __init__(self, workload: Workload) -> None:
        self.broken = 0
        self.longer = 0
        self._workload = workload

    def turns(self) -> Iterator[WrittenTurn]:
        """All rounds by session."""
        for session, members in enumerate(self._workload.by_session()):
            name, parts = self._workload.sessions[session].name, 0
            before: int | None = None
            for index in members:
                start = self._start(before, index)
                if before is None or not start:
                    conversation = name if not parts else f"{name}#{parts}"
                    parts += 1
                    yield WrittenTurn(index=index, conversation=conversation)
                else:
                    delay = self._workload.rounds[index].at_s
                    yield WrittenTurn(
                        index=index, conversation=conversation, start=start, delay_s=delay
                    )
                before = index

    def _start(self, before: int | None, index: int) -> int:
        """The token from which a round adds to the round `before`; 0 if it does not."""
        tree, rounds = self._workload.tree, self._workload.rounds
        round_ = rounds[index]
        if before is None or before not in round_.after:
            return 0
        earlier = rounds[before]
        size = self._workload.block_size
        held = earlier.input_tokens + earlier.output_tokens
        full = earlier.input_tokens // size * size
        if (
            round_.input_tokens <= held
            or tree.shared(earlier.branch, round_.branch, full) < full
            or not self._joins_only(before, round_.after)
        ):
            self.broken += 1
            return 0
        answered = held // size * size
        if tree.shared(earlier.output_branch, round_.branch, answered) < answered:
            self.longer += 1
        return held

    def _joins_only(self, before: int, after: tuple[int, ...]) -> bool:
        """True if no other turn of the same session is waited for."""
        rounds = self._workload.rounds
        session = rounds[before].session
        return all(each == before or rounds[each].session != session for each in after)
