"""The decode batch: sequences that get one token per step, at no cost per sequence and step.

The progress of a sequence is a function of the batch's step count. It is written to the sequence
only at events: a block is full, the output is complete, or the sequence leaves.
"""

import heapq
from typing import TypeAlias

from kvmesh.worker.enginecore.counters import variance
from kvmesh.worker.enginecore.sequence import Sequence

Filling: TypeAlias = tuple[int, int, int, Sequence]  # steps, arrival, index of the block


class DecodeBatch:
    """Members in order of joining; `clock` counts the steps taken.

    `out_of_slots` holds members without a free slot for a token, and sequences that have left.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.members: dict[Sequence, None] = {}
        self.out_of_slots: list[Sequence] = []
        self._due: list[tuple[int, int, Sequence]] = []
        # of the members' KV lengths less `clock`, which no step changes
        self._total = 0
        self._squares = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens of the members in memory."""
        return self._total + len(self.members) * self.clock

    @property
    def kv_variance(self) -> float:
        """The variance of the members' KV lengths, in tokens squared; 0 without members."""
        return variance(len(self.members), self._total, self._squares)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence whose prompt is computed; it takes part from the next step on."""
        sequence.synced_step = self.clock
        sequence.end_step = self.clock + sequence.remaining
        self.members[sequence] = None
        self._count(sequence, 1)
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a member after recording its progress."""
        sequence.advance(self.clock)
        sequence.due_step = -1
        self._count(sequence, -1)
        del self.members[sequence]

    def take_out_of_slots(self) -> list[Sequence]:
        """Return members without a free slot; the caller grants slots to each, or removes it."""
        waiting, self.out_of_slots = self.out_of_slots, []
        return [sequence for sequence in waiting if sequence in self.members]

    def grant_slots(self, sequence: Sequence, slots: int) -> None:
        """Give a member `slots` slots for tokens."""
        sequence.free_slots = slots
        self._enqueue(sequence)

    def steps_to_event(self) -> int:
        """Steps until a block is full or an output complete; needs members, none out of slots."""
        while self._due[0][2].due_step != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] - self.clock

    def steps_to_end(self) -> int:
        """Steps until the first output is complete; needs a member."""
        return min([s.end_step for s in self.members]) - self.clock

    def filling(self, steps: int) -> list[Filling]:
        """Members whose block is full before `steps` more steps are taken."""
        clock = self.clock
        return [
            (s.synced_step + s.free_slots - clock, s.arrival, s.full_blocks, s)
            for s in self.members
            if s.synced_step + s.free_slots - clock < steps
        ]

    def advance(self, steps: int) -> list[Sequence]:
        """Take `steps` steps, at most `steps_to_end`; return members with a full block or output.

        They remain members, with their progress recorded. A member that passed the end of its
        block has a negative number of free slots.
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
        """Continue a member whose full block is promoted and whose output is incomplete."""
        self._enqueue(sequence)

    def _count(self, sequence: Sequence, sign: int) -> None:
        offset = sequence.computed - sequence.synced_step
        self._total += sign * offset
        self._squares += sign * offset * offset

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.free_slots <= 0:
            self.out_of_slots.append(sequence)
            return
        sequence.due_step = min(self.clock + sequence.free_slots, sequence.end_step)
        heapq.heappush(self._due, (sequence.due_step, sequence.arrival, sequence))


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
