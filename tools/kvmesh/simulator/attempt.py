"""One round under way, over however many workers it takes."""

from kvmesh.simulator.fleet import Blank
from kvmesh.simulator.prompts import Hashes
from kvmesh.worker.enginecore.retention_request import RetentionRequest
from kvmesh.worker.enginecore.sequence import Request
from kvmesh.workload.model import Round

BLANK = Blank()


def target(round_: Round) -> int:
    """Answer tokens until the engine or the client has enough."""
    most, leaves = round_.output_tokens, round_.abort_after
    return most if leaves is None else max(1, min(most, leaves))


class Attempt:
    """Where a round is and how far. An attempt is one placement; moves and retries make more.

    With a `decoder`, the present worker only computes the prompt and that one goes on with it, the
    KV of `remote` tokens being sent over.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "decoder",
        "generated",
        "hashes",
        "index",
        "instance",
        "refusals",
        "remote",
        "round",
        "session",
        "told",
    )

    def __init__(self, index: int, round_: Round, hashes: Hashes, session: str) -> None:
        self.index = index
        self.session = session or None
        self.round = round_
        self.hashes = hashes
        self.generated = 0
        self.told = 0
        self.refusals = 0
        self.instance = ""
        self.decoder = ""
        self.remote = 0
        self.attempts = 0
        self.attempt = f"{index}.0"

    @property
    def tokens(self) -> int:
        """Length of the prompt that the next worker gets: what was generated comes along."""
        return self.round.input_tokens + self.generated

    @property
    def target(self) -> int:
        return target(self.round)

    def next_attempt(self) -> None:
        self.attempts += 1
        self.attempt = f"{self.index}.{self.attempts}"

    def moved(self) -> None:
        """Its worker is gone."""
        self.instance = self.decoder = ""
        self.remote = 0
        self.told = self.generated
        self.next_attempt()

    def request(self, salt: int) -> Request:
        """What the engine gets: the hashes of prompt and answer are known beforehand."""
        round_ = self.round
        return Request(
            id=self.attempt,
            length=self.tokens,
            local_hashes=self.hashes.local,
            sequence_hashes=self.hashes.sequence_hashes,
            tail=b"",
            source=BLANK,
            target=self.generated + 1 if self.decoder else self.target,
            finish="length" if round_.abort_after is None else "abort",
            generated=self.generated,
            salt=salt,
            priority=round_.priority,
            remote_tokens=self.remote,
            retention=self._asked(),
        )

    def _asked(self) -> RetentionRequest | None:
        """What a live frontend says of a request with a session."""
        if self.session is None:
            return None
        return RetentionRequest(
            segments=[], directives=[], prompt_directives=0, tenant="", session=self.session
        )
