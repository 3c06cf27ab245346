"""The default performance model of the mock engine."""

from dataclasses import dataclass

from kvmesh.step_times.interface import DecodeLoad


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
