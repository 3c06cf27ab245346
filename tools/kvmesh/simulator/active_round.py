"""State of one round in flight, across all its attempts."""

from kvmesh.bus.messages import BATCH_PRIORITY
from kvmesh.retention.hints import retained_prefixes
from kvmesh.retention.token_ranges import DEFAULTS
from kvmesh.simulator.fleet import BlankText
from kvmesh.simulator.prompts import RoundHashes
from kvmesh.worker.enginecore.retention_request import RetentionRequest, request_claims
from kvmesh.worker.enginecore.sequence import Request
from kvmesh.workload.model import Round

BLANK_TEXT = BlankText()


def output_limit(round_: Round) -> int:
    """Output tokens to generate: all of the round's, or as many as its client waits for."""
    tokens, abort_after = round_.output_tokens, round_.abort_after
    return tokens if abort_after is None else max(1, min(tokens, abort_after))


class ActiveRound:
    """A round in flight. Each placement is an attempt; migrations and retries make further ones.

    In disaggregated serving `instance` computes the prompt and `decoder` continues the sequence;
    `remote` is the number of tokens whose KV the handoff transfers.
    """

    __slots__ = (
        "attempt_id",
        "attempts",
        "decoder",
        "generated",
        "hashes",
        "index",
        "instance",
        "rejections",
        "remote",
        "reported",
        "round",
        "session",
    )

    def __init__(self, index: int, round_: Round, hashes: RoundHashes, session: str) -> None:
        self.index = index
        self.session = session or None
        self.round = round_
        self.hashes = hashes
        self.generated = 0
        self.reported = 0
        self.rejections = 0
        self.instance = ""
        self.decoder = ""
        self.remote = 0
        self.attempts = 0
        self.attempt_id = f"{index}.0"

    @property
    def tokens(self) -> int:
        """Prompt length of the next attempt, generated tokens included."""
        return self.round.input_tokens + self.generated

    @property
    def output_limit(self) -> int:
        return output_limit(self.round)

    def next_attempt(self) -> None:
        self.attempts += 1
        self.attempt_id = f"{self.index}.{self.attempts}"

    def migrate(self) -> None:
        """Start another attempt after the loss of the worker."""
        self.instance = self.decoder = ""
        self.remote = 0
        self.reported = self.generated
        self.next_attempt()

    def request(self, salt: int, block_size: int, batch: bool = False) -> Request:
        """The engine's request; the hashes cover prompt and output, both known in advance."""
        round_ = self.round
        return Request(
            id=self.attempt_id,
            length=self.tokens,
            local_hashes=self.hashes.local,
            sequence_hashes=self.hashes.sequence_hashes,
            tail=b"",
            source=BLANK_TEXT,
            target=self.generated + 1 if self.decoder else self.output_limit,
            finish="length" if round_.abort_after is None else "abort",
            generated=self.generated,
            salt=salt,
            priority=BATCH_PRIORITY if batch else round_.priority,
            remote_tokens=self.remote,
            retention=self._retention(block_size),
        )

    def _retention(self, block_size: int) -> RetentionRequest | None:
        """The retention request that a live worker derives from a request with a session or marks.

        Prompts of migrated requests end before the tokens generated so far, as live ones do.
        """
        marks = self.round.marks
        if self.session is None and not marks:
            return None
        return request_claims(
            retained_prefixes(marks),
            None,
            self.round.input_tokens,
            block_size,
            DEFAULTS,
            "",
            self.session,
        )
