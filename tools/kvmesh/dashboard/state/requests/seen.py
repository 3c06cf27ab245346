"""A request as its events tell of it. Pure."""

from kvmesh.bus.messages import Decision, Outcome
from kvmesh.frontend.namespaces import own_name


class SeenRequest:
    """One request, or one further choice of it: its placements, its outcome, and its progress.

    `state` is "waiting" in a router's queue, "prefill" or "decode" in engines, "left" when it has
    left either of them and neither another attempt nor the outcome is known, or "ended". Times are
    in Unix seconds. `generated` counts output tokens, about every block of them. `sequence` is the
    id of the last attempt. `turn` counts from 1 in its session; 0 if it has none. `seen_at` is the
    time of the last start, placement or end; no event by `alive_until`: its frontend has died.
    `bytes_beyond` is the memory of its events beyond the usual.
    """

    __slots__ = (
        "alive_until",
        "arrived",
        "bytes_beyond",
        "decisions",
        "generated",
        "instance",
        "outcome",
        "request",
        "seen_at",
        "sequence",
        "state",
        "turn",
    )

    def __init__(self, request: str, arrived: float) -> None:
        self.request = request
        self.arrived = arrived
        self.decisions: list[Decision] = []
        self.outcome: Outcome | None = None
        self.generated = 0
        self.instance = ""
        self.sequence = ""
        self.state = "waiting"
        self.alive_until = self.seen_at = arrived
        self.turn = 0
        self.bytes_beyond = 0

    @property
    def decision(self) -> Decision | None:
        """The latest placement."""
        return self.decisions[-1] if self.decisions else None

    @property
    def scoped_session(self) -> str:
        """The session's name, unique over all tenants; empty without a session."""
        if self.outcome is not None:
            return self.outcome.session
        return (self.decisions[-1].hints.session or "") if self.decisions else ""

    @property
    def session(self) -> str:
        return own_name(self.scoped_session)

    @property
    def tenant(self) -> str:
        if self.outcome is not None:
            return self.outcome.tenant
        return (self.decisions[-1].hints.tenant or "") if self.decisions else ""

    @property
    def model(self) -> str:
        if self.decisions:
            return self.decisions[-1].model
        return self.outcome.model if self.outcome is not None else ""

    @property
    def hashes(self) -> bytes:
        """The packed sequence hashes of the prompt; empty before it is placed."""
        return self.decisions[-1].sequence_hashes if self.decisions else b""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 before it is placed."""
        if self.outcome is not None and self.outcome.prompt_tokens:
            return self.outcome.prompt_tokens
        return self.decisions[0].tokens if self.decisions else 0

    @property
    def expected(self) -> int | None:
        """Prompt tokens that the last placement expects in caches."""
        if not self.decisions or not self.decisions[-1].block_size:
            return None
        decision = self.decisions[-1]
        rank = decision.prefill or decision.chosen
        return min(sum(rank.overlap) * decision.block_size, decision.tokens)
