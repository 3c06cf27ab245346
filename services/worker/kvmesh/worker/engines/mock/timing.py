"""How long a step takes on the hardware that the mock stands for."""

from dataclasses import dataclass
from typing import Protocol


class DecodeLoad:
    """What the decode part of a step works on: sequences, and KV tokens in use of all there are."""

    __slots__ = ("active_tokens", "sequences", "total_tokens")

    def __init__(self, sequences: int, active_tokens: int, total_tokens: int) -> None:
        self.sequences = sequences
        self.active_tokens = active_tokens
        self.total_tokens = total_tokens


class StepModel(Protocol):
    """Seconds of one engine step, prefill and decode added."""

    def prefill(self, tokens: int) -> float:
        """Seconds to compute `tokens` new prompt tokens in one batch; 0 for none."""
        ...

    def decode(self, load: DecodeLoad) -> float:
        """Seconds to generate one token for each sequence of `load`."""
        ...


@dataclass(frozen=True)
class PolynomialStepModel:
    """A large model on one accelerator; coefficients of milliseconds, highest power first.

    Prefill over new tokens in the batch, decode over the share of KV tokens in use. The defaults
    are those that NVIDIA Dynamo's mocker publishes.
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
