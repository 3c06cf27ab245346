"""The sequences that get a token in every step, in a form in which a step costs nothing for each.

A sequence's progress is a function of the batch's step count, written down only when something
happens to it: a block is full, the answer is complete, or it leaves.
"""

import heapq
from typing import TypeAlias

from kvmesh.worker.enginecore.sequence import Sequence

Filling: TypeAlias = tuple[int, int, int, Sequence]  # after how many steps, arrival, which block


class DecodeBatch:
    """Members in order of joining; `clock` counts the steps taken.

    Some of `out_of_slots` have no room for a token; the others have left.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.members: dict[Sequence, None] = {}
        self.out_of_slots: list[Sequence] = []
        self._due: list[tuple[int, int, Sequence]] = []

    def add(self, sequence: Sequence) -> None:
        """Let a sequence whose prompt is computed take part from the next step on."""
        sequence.synced_step = self.clock
        sequence.end_step = self.clock + sequence.remaining
        self.members[sequence] = None
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        sequence.advance(self.clock)
        sequence.due_step = -1
        del self.members[sequence]

    def take_out_of_slots(self) -> list[Sequence]:
        """Those without room for a token: each must be granted some, or be removed."""
        needy, self.out_of_slots = self.out_of_slots, []
        return [sequence for sequence in needy if sequence in self.members]

    def grant_slots(self, sequence: Sequence, room: int) -> None:
        """Give a member room for that many tokens."""
        sequence.free_slots = room
        self._enqueue(sequence)

    def steps_to_event(self) -> int:
        """Steps until something happens to a member; there must be one, and none needy."""
        while self._due[0][2].due_step != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] - self.clock

    def steps_to_end(self) -> int:
        """Steps until the first answer is complete; there must be a member."""
        return min([s.end_step for s in self.members]) - self.clock

    def filling(self, steps: int) -> list[Filling]:
        """The members whose block is full before `steps` more steps are taken."""
        clock = self.clock
        return [
            (s.synced_step + s.free_slots - clock, s.arrival, s.full_blocks, s)
            for s in self.members
            if s.synced_step + s.free_slots - clock < steps
        ]

    def advance(self, steps: int) -> list[Sequence]:
        """Take as many steps, at most `steps_to_end`; returns whose block or answer is full now.

        They remain members, their progress written down. One that has passed the end of its room
        has less than none left.
        """
        clock = self.clock = self.clock + steps
        waiting, full = self._due, []
        while waiting and waiting[0][0] <= clock:
            due, _, sequence = heapq.heappop(waiting)
            if sequence.due_step == due:
                sequence.due_step = -1
                sequence.advance(clock)
                full.append(sequence)
        if len(full) > 1:
            full.sort(key=_arrival)
        return full

    def resume(self, sequence: Sequence) -> None:
        """What was full has been dealt with, and the answer is not complete."""
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.free_slots <= 0:
            self.out_of_slots.append(sequence)
            return
        sequence.due_step = min(self.clock + sequence.free_slots, sequence.end_step)
        heapq.heappush(self._due, (sequence.due_step, sequence.arrival, sequence))


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
