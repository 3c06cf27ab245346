"""Decisions which answers are followed by a speculative prefill, by what came of earlier ones.

Speculation pays if the next prompts read what it computed. Whether they do depends on the template,
on the client and on what the session waits for, so it is measured for each such follow-up. Pure.
"""

from collections import Counter
from typing import Literal, NamedTuple

SpeculationMode = Literal["auto", "hinted", "off"]
Waits = Literal["tools", "user"]
FIRST_TRIALS = 16  # answers of a family that are all followed by a trial
TRIAL_EVERY = 20  # later answers that would not be followed by one otherwise
MIN_TRIALS = 8
MIN_USEFUL_SHARE = 0.9
MIN_TOKENS = 32.0  # used on average: the rest of a block is not worth a request
MEMORY = 0.97  # weight of a trial after the next one
MAX_FAMILIES = 4096


class FollowUpFamily(NamedTuple):
    """Follow-ups of one model's answers, by the kind of agent and whether it returns thinking."""

    model: str
    agent: str
    returns_thinking: bool


class FollowUp(NamedTuple):
    """A next prompt, with the results of tools or a message of the user."""

    family: FollowUpFamily
    waits: Waits


class _Record:
    """Decayed sums of the tokens that were requested and used, over `trials` speculations."""

    __slots__ = ("requested", "trials", "useful")

    def __init__(self) -> None:
        self.trials = self.requested = self.useful = 0.0

    def add(self, requested: int, useful: int) -> None:
        self.trials = self.trials * MEMORY + 1
        self.requested = self.requested * MEMORY + requested
        self.useful = self.useful * MEMORY + useful

    @property
    def is_known(self) -> bool:
        return self.trials >= MIN_TRIALS

    @property
    def pays(self) -> bool:
        return (
            self.is_known
            and self.useful >= MIN_USEFUL_SHARE * self.requested
            and self.useful >= MIN_TOKENS * self.trials
        )


class PlannedSpeculation(NamedTuple):
    """A speculation that may follow an answer: hinted by the caller, a `trial`, or if it pays."""

    family: FollowUpFamily
    hinted: bool
    trial: bool


class SpeculationGate:
    """Follow-ups by `mode`: "auto" after those that pay and in trials, "hinted" on request only.

    A hint is followed until the speculations on such follow-ups do not pay; then one of TRIAL_EVERY
    is, as of the others in mode "auto" after the first ones. Families beyond MAX_FAMILIES are left
    out.
    """

    def __init__(self, mode: SpeculationMode) -> None:
        self._mode = mode
        self._records: dict[FollowUpFamily, dict[str, _Record]] = {}
        self._answers: Counter[FollowUpFamily] = Counter()
        self._skipped: Counter[FollowUp] = Counter()

    def plan(self, family: FollowUpFamily, hinted: bool) -> PlannedSpeculation | None:
        """Plan a speculation before an answer, which is recorded for it; None if there is none."""
        if self._mode == "off" or (self._mode == "hinted" and not hinted):
            return None
        if hinted:
            return PlannedSpeculation(family, True, False)
        records = self._records.get(family)
        if records is not None and any(record.pays for record in records.values()):
            return PlannedSpeculation(family, False, False)
        if family not in self._answers and len(self._answers) >= MAX_FAMILIES:
            return None
        self._answers[family] += 1
        answers = self._answers[family]
        if answers > FIRST_TRIALS and answers % TRIAL_EVERY:
            return None
        return PlannedSpeculation(family, False, True)

    def allows(self, planned: PlannedSpeculation, waits: Waits) -> bool:
        """True if the planned speculation is to be made, now that it is known what follows."""
        record = self._records.get(planned.family, {}).get(waits)
        if planned.trial or (record is not None and record.pays):
            return True
        if planned.hinted and (record is None or not record.is_known):
            return True
        follow_up = FollowUp(planned.family, waits)
        self._skipped[follow_up] += 1
        return self._skipped[follow_up] % TRIAL_EVERY == 0

    def record(self, follow_up: FollowUp, requested: int, useful: int) -> None:
        """Record a speculation: the tokens it was to compute, and those the next prompt used.

        Both are 0 if there was nothing to compute.
        """
        records = self._records.get(follow_up.family)
        if records is None:
            if len(self._records) >= MAX_FAMILIES:
                return
            records = self._records[follow_up.family] = {}
        records.setdefault(follow_up.waits, _Record()).add(requested, useful)
