"""Fingerprints of a rank's blocks, by which two views of the rank are compared.

A fingerprint mixes tier, engine hash and local hash of a block; a digest is their sum. Equal views
have equal digests; different ones have equal digests with a probability of 2⁻⁶⁴.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.index.interface import Buffer

Fingerprints = NDArray[np.uint64]
_TIER = np.uint64(0x9E3779B97F4A7C15)
_ENGINE = np.uint64(0xD6E8FEB86659FD93)
_MIX = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(32)


class HashRun(NamedTuple):
    """Blocks of one tier, as packed engine and local hashes."""

    tier: int
    engine: Buffer
    local: Buffer


def fingerprints(runs: Iterable[HashRun]) -> Fingerprints:
    """The fingerprints of all distinct blocks, sorted."""
    found = [_of_run(run) for run in runs]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint64)


def digest(blocks: Fingerprints) -> int:
    """The sum of the fingerprints, modulo 2⁶⁴."""
    return int(blocks.sum(dtype=np.uint64))


def unpack(packed: Buffer) -> Fingerprints:
    """Fingerprints from their little-endian form; raises ValueError for a partial one."""
    return np.frombuffer(packed, "<u8").astype(np.uint64)


def _of_run(run: HashRun) -> Fingerprints:
    engine, local = np.frombuffer(run.engine, "<u8"), np.frombuffer(run.local, "<u8")
    with np.errstate(over="ignore"):
        mixed = (engine * _ENGINE) ^ (local + np.uint64(run.tier + 1) * _TIER)
        mixed ^= mixed >> _SHIFT
        mixed *= _MIX
        mixed ^= mixed >> _SHIFT
    return mixed
