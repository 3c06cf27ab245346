"""Speculative prefill: simulated frontends have the start of each session's next prompt computed.

It mirrors the session hooks of a live frontend, with the same gate and open speculations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvmesh.frontend.sessions.speculation_gate import (
    FollowUp,
    FollowUpFamily,
    SpeculationGate,
    SpeculationMode,
    Waits,
)
from kvmesh.frontend.sessions.speculations import (
    LIFETIME_S,
    Speculation,
    SpeculativePrefills,
    common_blocks,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.retention.token_ranges import DEFAULTS
from kvmesh.simulator.active_round import BLANK_TEXT
from kvmesh.simulator.clients.harness import Harness
from kvmesh.simulator.fleet import MODEL, SimulatedWorker
from kvmesh.simulator.prompts import RoundHashes, SimulatedPrompts
from kvmesh.worker.enginecore.retention_request import PREFETCH_PRIORITY, request_claims
from kvmesh.worker.enginecore.sequence import Request
from kvmesh.workload.model import TOOL, Workload


@dataclass
class SpeculationRecord:
    """Speculative prefills of a run, and their tokens: computed, and used by the next prompts."""

    prefills: int = 0
    computed_tokens: int = 0
    useful_tokens: int = 0


@dataclass
class SpeculatingFrontends:
    """Speculates after the answers that the gate allows, `most_tokens` tokens at most.

    The predicted prompt is the conversation with the answer as the next prompt contains it.
    """

    workload: Workload
    prompts: SimulatedPrompts
    workers: Mapping[str, SimulatedWorker]
    harness: Harness
    block_size: int
    mode: SpeculationMode
    most_tokens: int
    record: SpeculationRecord = field(default_factory=SpeculationRecord)
    _open: SpeculativePrefills = field(default_factory=SpeculativePrefills)
    _used_by: dict[int, tuple[Speculation, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gate = SpeculationGate(self.mode)

    def begin(self, index: int, hashes: RoundHashes, now: float) -> None:
        """A round arrives: stop the speculation on its prompt, which it computes itself."""
        for expired in self._open.expire(now):
            self._count(expired, 0, expired.requested_tokens)
        round_ = self.workload.rounds[index]
        prompt = hashes.sequence_hashes[: round_.input_tokens // self.block_size * HASH_BYTES]
        speculation = self._open.pop("", str(round_.session), prompt)
        if speculation is None:
            return
        stopped = self._abort(speculation)
        if speculation.fits(prompt):
            self._used_by[index] = speculation, stopped
        else:
            self._count(speculation, 0, speculation.requested_tokens)

    def prefilled(self, index: int, cached: int) -> None:
        """The prompt of a round is computed; `cached` tokens of it were."""
        if index not in self._used_by:
            return
        speculation, stopped = self._used_by.pop(index)
        first = speculation.base_blocks * self.block_size
        used = min(max(cached - first, 0), speculation.requested_tokens)
        self._count(speculation, used, used if stopped else speculation.requested_tokens)

    def ended(self, index: int, instance: str, generated: int, now: float) -> None:
        """An answer of `generated` tokens has ended: have the next prompt's start computed."""
        round_, size = self.workload.rounds[index], self.block_size
        follow_up = self._follow_up(index)
        if follow_up is None:
            return
        known = self.prompts.prefix(*round_.as_rendered(generated))
        held = self.prompts.prefix(round_.output_branch, round_.input_tokens + generated)
        base = common_blocks(held.sequence_hashes, known.sequence_hashes)
        blocks = len(known.sequence_hashes) // HASH_BYTES
        most = self._gate.most_tokens(follow_up, self.most_tokens)
        missing = min(blocks - base, most // size)
        if not base or missing <= 0:
            self._gate.record(follow_up, 0, 0)
            return
        hashes = known.sequence_hashes
        speculation = Speculation(
            id=f"ahead.{index}",
            tenant="",
            session=str(round_.session),
            instance=instance,
            model=MODEL,
            base_hash=hashes[(base - 1) * HASH_BYTES : base * HASH_BYTES],
            base_blocks=base,
            end_hash=hashes[-HASH_BYTES:],
            blocks=blocks,
            requested_tokens=missing * size,
            after=str(index),
            follow_up=follow_up,
            expires=now + LIFETIME_S,
        )
        for replaced in self._open.add(speculation):
            self._abort(replaced)
            self._count(replaced, 0, replaced.requested_tokens)
        self.record.prefills += 1
        self.record.computed_tokens += speculation.requested_tokens
        session = self.workload.sessions[round_.session].name or None
        self.workers[instance].submit(self._request(speculation, known, base + missing, session))

    def _follow_up(self, index: int) -> FollowUp | None:
        """The follow-up of an answer; None if the gate does not allow a speculation on it."""
        round_ = self.workload.rounds[index]
        keeps = round_.output_branch == round_.branch
        family = FollowUpFamily(MODEL, self.harness.agent(index), keeps)
        planned = self._gate.plan(family, self.mode == "hinted")
        waits: Waits = "tools" if TOOL in self.harness.waits_for(index) else "user"
        if planned is None or not self._gate.allows(planned, waits):
            return None
        return FollowUp(family, waits)

    def _count(self, speculation: Speculation, useful: int, computed: int) -> None:
        self.record.useful_tokens += useful
        self.record.computed_tokens -= speculation.requested_tokens - computed
        self._gate.record(speculation.follow_up, computed, useful)

    def _abort(self, speculation: Speculation) -> bool:
        worker = self.workers.get(speculation.instance)
        return worker is not None and worker.abort(speculation.id)

    def _request(
        self, speculation: Speculation, known: RoundHashes, blocks: int, session: str | None
    ) -> Request:
        """The engine's request for the first blocks of a predicted prompt, behind all others."""
        tokens, end = blocks * self.block_size, blocks * HASH_BYTES
        claims = request_claims([], None, tokens, self.block_size, DEFAULTS, "", session)
        return Request(
            id=speculation.id,
            length=tokens,
            local_hashes=known.local[:end],
            sequence_hashes=known.sequence_hashes[:end],
            tail=b"",
            source=BLANK_TEXT,
            target=1,
            salt=self.prompts.salt,
            priority=PREFETCH_PRIORITY,
            retention=replace(claims, ahead=True),
        )
