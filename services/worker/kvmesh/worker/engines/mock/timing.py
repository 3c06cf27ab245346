"""Performance models: the time of an engine step on the simulated hardware."""

from dataclasses import dataclass
from typing import Protocol


class DecodeLoad:
    """The decode part of a step: number of sequences, KV tokens in use, and KV tokens in total."""

    __slots__ = ("active_tokens", "sequences", "total_tokens")

    def __init__(self, sequences: int, active_tokens: int, total_tokens: int) -> None:
        self.sequences = sequences
        self.active_tokens = active_tokens
        self.total_tokens = total_tokens


class StepModel(Protocol):
    """Seconds of one engine step; prefill and decode add up."""

    def prefill(self, tokens: int) -> float:
        """Seconds to compute `tokens` new prompt tokens in one batch; 0 for none."""
        ...

    def decode(self, load: DecodeLoad) -> float:
        """Seconds to generate one token for each sequence of `load`."""
        ...


@dataclass(frozen=True)
class PolynomialStepModel:
    """A large model on one accelerator; coefficients of milliseconds, highest power first.

    Prefill is a polynomial of the new tokens in the batch, decode one of the share of KV tokens in
    use. The defaults are those that NVIDIA Dynamo's mocker publishes.
    """

    prefill_ms: tuple[float, float, float] = (4.209989e-07, 1.518344e-02, 16.50142)
    decode_ms: tuple[float, float, float] = (-25.74, 54.01, 5.74)

    def prefill(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        a, b, c = self.prefill_ms
        return (a * tokens * tokens + b * tokens + c) / 1000

    def decode(self, load: DecodeLoad) -> float:
        if not load.sequences:
            return 0.0
        a, b, c = self.decode_ms
        used = load.active_tokens / load.total_tokens
        return max(1.0, a * used * used + b * used + c) / 1000
