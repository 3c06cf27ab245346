"""Vectors and scores of the mock engine: texts that share tokens are alike. Pure."""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvmesh.bus.messages import EMBED, Pooling, Work
from kvmesh.worker.engines.mock.text.author import FixedTokens, MockAnswer

DIMENSIONS = 64
ANSWER = MockAnswer(FixedTokens([0]), 1, "stop")  # the step that computes the inputs
Vector = npt.NDArray[np.float32]


def check(pooling: Pooling) -> None:
    """Raise ValueError for vectors longer than the mock's."""
    if (wanted := pooling.dimensions) is not None and not 1 <= wanted <= DIMENSIONS:
        raise ValueError(f"dimensions is {wanted}; this model's vectors have 1 to {DIMENSIONS}")


def vectors_of(work: Work, pooling: Pooling) -> list[bytes]:
    """The vectors of the inputs of a work, or their scores in [0, 1]."""
    if pooling.task == EMBED:
        length = pooling.dimensions or DIMENSIONS
        return [_embedding(tokens, length).tobytes() for tokens in _inputs(work, pooling)]
    pairs = zip(_inputs(work, pooling), pooling.seconds, strict=True)
    return [_score(tokens[:second], tokens[second:]).tobytes() for tokens, second in pairs]


def _inputs(work: Work, pooling: Pooling) -> Iterator[list[int]]:
    tokens, start = memoryview(work.tokens).cast("I"), 0
    for length in pooling.lengths:
        yield tokens[start : start + length].tolist()
        start += length


def _embedding(tokens: list[int], length: int) -> Vector:
    """The sum of fixed vectors of the tokens, of length 1."""
    total: Vector = np.sum([_of_token(token) for token in tokens], axis=0)[:length]
    norm = float(np.linalg.norm(total))
    return (total / (norm or 1.0)).astype("<f4")


@lru_cache(maxsize=4096)
def _of_token(token: int) -> Vector:
    digest = blake2b(token.to_bytes(4, "little"), digest_size=DIMENSIONS).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32) / 127.5 - 1.0


def _score(query: list[int], document: list[int]) -> Vector:
    """The share of the query's tokens that the document has."""
    wanted = set(query)
    return np.array([len(wanted & set(document)) / max(len(wanted), 1)], "<f4")
