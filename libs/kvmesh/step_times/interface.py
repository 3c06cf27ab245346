"""The interface of performance models: the time of an engine step on some hardware."""

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
