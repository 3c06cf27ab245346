"""Sampling: penalties, biases and masks on the logits, then argmax or a random draw.

The draw for the i-th token of an output is a function of the seed and i alone: a seeded output is
the same on every worker, in every batch, and after a migration.
"""

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvmesh.bus.messages import Sampling

GREEDY_BELOW = 1e-5


class Constraint(Protocol):
    """State of guided decoding for one output."""

    @property
    def ended(self) -> bool:
        """True if no token may follow."""
        ...

    @property
    def error(self) -> str:
        """Reason why decoding cannot continue; empty if it can."""
        ...

    def allowed(self) -> Tensor:
        """Mask of the tokens that may follow: a boolean per token of the vocabulary."""
        ...

    def advance(self, token: int) -> None:
        """Consume a sampled token."""
        ...


class SampledToken(NamedTuple):
    """A token with its log probabilities and those of the top tokens.

    `stop`: the token ends the output. A non-empty `error` ends it as failed.
    """

    token: int
    logprobs: dict[int, float] | None
    stop: bool
    error: str = ""


class Sampler:
    """Samples the tokens of one request.

    `output` are the output tokens that are known already (after a migration), `eos_tokens`
    the model's own stop tokens; `seed` is used if the request has none.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        output: Sequence[int],
        eos_tokens: frozenset[int],
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling = sampling
        self.stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stops |= eos_tokens
        self._seed = seed if sampling.seed is None else sampling.seed
        self._constraint = constraint
        self._prompt = frozenset(prompt) if sampling.repetition_penalty != 1.0 else frozenset()
        self._counts: dict[int, int] = {}
        for token in output:
            self._record(token)

    def sample(self, logits: Tensor, index: int) -> SampledToken:
        """Sample the token at `index` of the output from float32 logits [vocabulary]."""
        scores = self._adjusted(logits, index)
        if self.sampling.temperature < GREEDY_BELOW:
            token = int(scores.argmax())
        else:
            token = self._draw(scores, Random(f"{self._seed}:{index}").random())
        self._record(token)
        ended = self._constraint is not None and self._constraint.ended
        stop = ended or (token in self.stops and index >= self.sampling.min_tokens)
        error = self._constraint.error if self._constraint is not None else ""
        return SampledToken(token, self._logprobs(logits, token), stop or bool(error), error)

    def _record(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.advance(token)

    def _adjusted(self, logits: Tensor, index: int) -> Tensor:
        sampling = self.sampling
        scores = logits.clone()
        if sampling.repetition_penalty != 1.0:
            seen = _index(self._prompt | self._counts.keys(), len(scores))
            values, penalty = scores[seen], sampling.repetition_penalty
            scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts and (sampling.frequency_penalty or sampling.presence_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=scores.dtype)
            penalties = counts * sampling.frequency_penalty + sampling.presence_penalty
            scores[torch.tensor(list(self._counts))] -= penalties
        for token, bias in sampling.logit_bias.items():
            if 0 <= token < len(scores):
                scores[token] += bias
        return self._masked(scores, index)

    def _masked(self, scores: Tensor, index: int) -> Tensor:
        if self._constraint is not None:
            return scores.masked_fill(~self._constraint.allowed(), -torch.inf)
        if index < self.sampling.min_tokens:
            scores[_index(self.stops, len(scores))] = -torch.inf
        return scores

    def _draw(self, scores: Tensor, draw: float) -> int:
        sampling = self.sampling
        probabilities = torch.softmax(scores / sampling.temperature, -1)
        values, order = probabilities.sort(descending=True, stable=True)
        if sampling.top_k > 0:
            values[sampling.top_k :] = 0
        if sampling.top_p < 1:
            before = values.cumsum(0) - values
            values[before >= sampling.top_p * values.sum()] = 0
        if sampling.min_p > 0:
            values[values < sampling.min_p * values[0]] = 0
        cumulative = values.double().cumsum(0)
        index = int(torch.searchsorted(cumulative, draw * float(cumulative[-1]), right=True))
        return int(order[min(index, int(values.count_nonzero()) - 1)])

    def _logprobs(self, logits: Tensor, token: int) -> dict[int, float] | None:
        """Log probabilities of the model's own distribution, before any adjustment."""
        count = self.sampling.logprobs
        if count is None:
            return None
        logprobs = torch.log_softmax(logits, -1)
        best = torch.topk(logprobs, min(count, len(logits)))
        rest = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return {token: float(logprobs[token]), **rest}


def _index(tokens: Iterable[int], vocabulary: int) -> Tensor:
    return torch.tensor([t for t in tokens if t < vocabulary], dtype=torch.int64)
