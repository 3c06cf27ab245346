"""From logits to a token: penalties, biases and masks first, then greedy choice or a draw.

The draw for the i-th token of an answer is a function of the seed and i alone, so an answer with a
seed is the same on every worker, in every batch, and continued after a move.
"""

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvmesh.bus.messages import Sampling

GREEDY_BELOW = 1e-5


class Constraint(Protocol):
    """What may come next, as guided decoding sees it."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        ...

    @property
    def fault(self) -> str:
        """Why it cannot be followed any further; empty if it can."""
        ...

    def allowed(self) -> Tensor:
        """A boolean per token of the vocabulary."""
        ...

    def take(self, token: int) -> None:
        """This token was chosen."""
        ...


class Picked(NamedTuple):
    """A token, log probabilities of it and of the likeliest ones, and whether it is the last.

    With a `fault` it is the last, too, and the answer is none.
    """

    token: int
    logprobs: dict[int, float] | None
    stop: bool
    fault: str = ""


class Sampler:
    """Chooses the tokens of one request, of whose answer `said` are known already.

    `ends` are the model's own stop tokens, `seed` stands in if the request has none.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        said: Sequence[int],
        ends: frozenset[int],
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling = sampling
        self.stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stops |= ends
        self._seed = seed if sampling.seed is None else sampling.seed
        self._constraint = constraint
        self._prompt = frozenset(prompt) if sampling.repetition_penalty != 1.0 else frozenset()
        self._said: dict[int, int] = {}
        for token in said:
            self._note(token)

    def pick(self, logits: Tensor, index: int) -> Picked:
        """The token at place `index` of the answer, from float32 logits [vocabulary]."""
        scores = self._adjusted(logits, index)
        if self.sampling.temperature < GREEDY_BELOW:
            token = int(scores.argmax())
        else:
            token = self._draw(scores, Random(f"{self._seed}:{index}").random())
        self._note(token)
        ended = self._constraint is not None and self._constraint.ended
        stop = ended or (token in self.stops and index >= self.sampling.min_tokens)
        fault = self._constraint.fault if self._constraint is not None else ""
        return Picked(token, self._logprobs(logits, token), stop or bool(fault), fault)

    def _note(self, token: int) -> None:
        self._said[token] = self._said.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.take(token)

    def _adjusted(self, logits: Tensor, index: int) -> Tensor:
        sampling = self.sampling
        scores = logits.clone()
        if sampling.repetition_penalty != 1.0:
            seen = _index(self._prompt | self._said.keys(), len(scores))
            values, penalty = scores[seen], sampling.repetition_penalty
            scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._said and (sampling.frequency_penalty or sampling.presence_penalty):
            counts = torch.tensor(list(self._said.values()), dtype=scores.dtype)
            penalties = counts * sampling.frequency_penalty + sampling.presence_penalty
            scores[torch.tensor(list(self._said))] -= penalties
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

    def _draw(self, scores: Tensor, chance: float) -> int:
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
        reach = values.double().cumsum(0)
        place = int(torch.searchsorted(reach, chance * float(reach[-1]), right=True))
        return int(order[min(place, int(values.count_nonzero()) - 1)])

    def _logprobs(self, logits: Tensor, token: int) -> dict[int, float] | None:
        """Of the model's own distribution, before any adjustment."""
        count = self.sampling.logprobs
        if count is None:
            return None
        all_of_them = torch.log_softmax(logits, -1)
        best = torch.topk(all_of_them, min(count, len(logits)))
        rest = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return {token: float(all_of_them[token]), **rest}


def _index(tokens: Iterable[int], vocabulary: int) -> Tensor:
    return torch.tensor([t for t in tokens if t < vocabulary], dtype=torch.int64)
