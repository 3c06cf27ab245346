"""Decisions which answers are followed by a speculative prefill, by what came of earlier ones.

Speculation pays if the next prompts read what it computed. Whether they do depends on the template,
on the client and on what the session waits for, so it is measured for each such follow-up. Each
tenant has measurements of its own: its callers decide what its next prompts are. Pure.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvmesh.bus.messages import LearnerReport
from kvmesh.runtime.lru import LruCache

SpeculationMode = Literal["auto", "hinted", "off"]
Waits = Literal["tools", "user"]
WAITS: tuple[Waits, ...] = ("tools", "user")
FIRST_TRIALS = 16  # follow-ups of a kind that are all trials
NEW_ANSWERS = 512  # of a family, among which its first trials are
TRIAL_EVERY = 20  # later answers that would not be followed by one otherwise
TRIAL_TOKENS = 8192
MIN_TRIALS = 8
MIN_USEFUL_SHARE = 0.9
MIN_TOKENS = 32.0  # used on average: the rest of a block is not worth a request
MEMORY = 0.97  # weight of a trial after the next one
MAX_FAMILIES = 256  # of one tenant
MAX_TENANTS = 1024  # the latest


class FollowUpFamily(NamedTuple):
    """Follow-ups of one model's answers, by the kind of agent and whether it returns thinking.

    `tenant` is the tag of a whole tenant: its parts share what was measured.
    """

    model: str
    agent: str
    returns_thinking: bool
    tenant: str = ""


class FollowUp(NamedTuple):
    """A next prompt, with the results of tools or a message of the user."""

    family: FollowUpFamily
    waits: Waits


class _Record:
    """Decayed sums of the tokens that were computed and used, over `trials` speculations."""

    __slots__ = ("computed", "trials", "useful")

    def __init__(self) -> None:
        self.trials = self.computed = self.useful = 0.0

    def add(self, computed: float, useful: float) -> None:
        self.trials = self.trials * MEMORY + 1
        self.computed = self.computed * MEMORY + computed
        self.useful = self.useful * MEMORY + useful

    def merge(self, other: "_Record") -> None:
        self.trials += other.trials
        self.computed += other.computed
        self.useful += other.useful

    @property
    def is_known(self) -> bool:
        return self.trials >= MIN_TRIALS

    @property
    def pays(self) -> bool:
        return (
            self.is_known
            and self.useful >= MIN_USEFUL_SHARE * self.computed
            and self.useful >= MIN_TOKENS * self.trials
        )


class PlannedSpeculation(NamedTuple):
    """A speculation that may follow an answer.

    The caller hints at it, follow-ups of the family pay, it is due as a trial, or those of a new
    kind are first trials.
    """

    family: FollowUpFamily
    reason: Literal["hint", "pays", "due", "new"]


class _TenantGate:
    """The gate of one tenant, for at most MAX_FAMILIES families; others are left out."""

    def __init__(self) -> None:
        self.records: dict[FollowUpFamily, dict[Waits, _Record]] = {}
        self._answers: Counter[FollowUpFamily] = Counter()
        self._trials: Counter[FollowUp] = Counter()
        self._skipped: Counter[FollowUp] = Counter()

    def plan(self, family: FollowUpFamily) -> PlannedSpeculation | None:
        records = self.records.get(family, {})
        if any(record.pays for record in records.values()):
            return PlannedSpeculation(family, "pays")
        if family not in self._answers and len(self._answers) >= MAX_FAMILIES:
            return None
        self._answers[family] += 1
        if self._answers[family] % TRIAL_EVERY == 0:
            return PlannedSpeculation(family, "due")
        return PlannedSpeculation(family, "new") if self._is_new(family) else None

    def allows(self, planned: PlannedSpeculation, waits: Waits) -> bool:
        follow_up = FollowUp(planned.family, waits)
        record = self.find(follow_up)
        if planned.reason == "due" or (record is not None and record.pays):
            return True
        if planned.reason == "hint":
            if record is None or not record.is_known:
                return True
        elif self._trials[follow_up] < FIRST_TRIALS:
            self._trials[follow_up] += 1
            return True
        elif planned.reason == "new":
            return False
        self._skipped[follow_up] += 1
        return self._skipped[follow_up] % TRIAL_EVERY == 0

    def find(self, follow_up: FollowUp) -> _Record | None:
        return self.records.get(follow_up.family, {}).get(follow_up.waits)

    def _is_new(self, family: FollowUpFamily) -> bool:
        """True if answers of the family are still awaited for the first trials of a kind."""
        if self._answers[family] > NEW_ANSWERS:
            return False
        return any(self._trials[FollowUp(family, waits)] < FIRST_TRIALS for waits in WAITS)

    def record(self, follow_up: FollowUp, computed: int, useful: int) -> None:
        records = self.records.get(follow_up.family)
        if records is None:
            if len(self.records) >= MAX_FAMILIES:
                return
            records = self.records[follow_up.family] = {}
        records.setdefault(follow_up.waits, _Record()).add(computed, useful)


class SpeculationGate:
    """Follow-ups by `mode`: "auto" after those that pay and in trials, "hinted" on request only.

    The first FIRST_TRIALS follow-ups of each kind are trials, then one of TRIAL_EVERY. A hint is
    followed until the speculations on such follow-ups do not pay. What comes of a tenant's
    speculations counts for that tenant alone; the MAX_TENANTS latest tenants are remembered.
    """

    def __init__(self, mode: SpeculationMode) -> None:
        self._mode = mode
        self._gates: LruCache[str, _TenantGate] = LruCache(MAX_TENANTS)

    def plan(self, family: FollowUpFamily, hinted: bool) -> PlannedSpeculation | None:
        """Plan a speculation before an answer, which is recorded for it; None if there is none."""
        if self._mode == "off" or (self._mode == "hinted" and not hinted):
            return None
        if hinted:
            return PlannedSpeculation(family, "hint")
        return self._of(family).plan(family)

    def allows(self, planned: PlannedSpeculation, waits: Waits) -> bool:
        """True if the planned speculation is to be made, now that it is known what follows."""
        return self._of(planned.family).allows(planned, waits)

    def most_tokens(self, follow_up: FollowUp, limit: int) -> int:
        """The most tokens of a speculation: `limit` where speculations pay, fewer in trials."""
        record = self._of(follow_up.family).find(follow_up)
        return limit if record is not None and record.pays else min(limit, TRIAL_TOKENS)

    def record(self, follow_up: FollowUp, computed: int, useful: int) -> None:
        """Record a speculation: the tokens that it computed, and those that the next prompt used.

        Both are 0 if there was nothing to compute.
        """
        self._of(follow_up.family).record(follow_up, computed, useful)

    def _of(self, family: FollowUpFamily) -> _TenantGate:
        gate = self._gates.get(family.tenant)
        if gate is None:
            gate = _TenantGate()
            self._gates.put(family.tenant, gate)
        return gate

    def report(self, model: str) -> Iterator[LearnerReport]:
        """The use of the speculations on each kind of follow-up to a model's answers.

        The tenants' records are added up.
        """
        found: defaultdict[FollowUp, list[_Record]] = defaultdict(list)
        for family, waits, record in self._records():
            if family.model == model:
                found[FollowUp(family._replace(tenant=""), waits)].append(record)
        for follow_up, records in found.items():
            yield _report(follow_up, records)

    @property
    def models(self) -> set[str]:
        """The models with a record."""
        return {family.model for family, _, _ in self._records()}

    def _records(self) -> Iterator[tuple[FollowUpFamily, Waits, _Record]]:
        for tenant in self._gates:
            gate = self._gates.peek(tenant)
            for family, records in gate.records.items() if gate is not None else ():
                for waits, record in records.items():
                    yield family, waits, record


def _report(follow_up: FollowUp, records: list[_Record]) -> LearnerReport:
    family, tools = follow_up.family, follow_up.waits == "tools"
    after = "results of tools" if tools else "messages of the user"
    thinking = "" if family.returns_thinking else ", without thinking"
    whole = _Record()
    for record in records:
        whole.merge(record)
    share = whole.useful / whole.computed if whole.computed else 0.0
    paying = sum(record.pays for record in records)
    if len(records) > 1:
        reason = f"it pays for {paying} of {len(records)} tenants"
    elif paying:
        reason = f"at least {MIN_USEFUL_SHARE:.0%} of the tokens are used"
    elif not whole.is_known:
        reason = f"fewer than {MIN_TRIALS} trials"
    else:
        reason = f"fewer than {MIN_USEFUL_SHARE:.0%} of the tokens are used, or too few"
    return LearnerReport(
        model=family.model,
        learner="speculation",
        fallback="none",
        about=f"{family.agent or 'any agent'}, {after}{thinking}",
        observations=whole.trials,
        held_out=whole.trials,
        measure="tokens used less tokens wasted, of those computed ahead",
        own=2 * share - 1 if whole.computed else 0.0,
        gain=2 * share - 1 if whole.computed else 0.0,
        on=paying > 0,
        reason=reason,
    )
