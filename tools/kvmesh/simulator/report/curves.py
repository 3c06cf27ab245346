"""Curves of requests for plots: distribution of a latency, cached share over time."""

import numpy as np

from kvmesh.simulator.records import Column

SHORTEST_S = 1e-3  # of a latency on a logarithmic axis


def distribution(seconds: Column) -> tuple[Column, Column]:
    """Latencies in order, and the share of requests up to each; unknown ones (NaN) do not count."""
    values = np.sort(seconds[~np.isnan(seconds)])
    shares = np.linspace(0, 1, len(values)) if len(values) else values
    return np.maximum(values, SHORTEST_S), shares


def cached_over_time(
    arrived: Column, prompt: Column, cached: Column, bins: int = 60
) -> tuple[Column, Column]:
    """Start of each part of the time, and the cached share of its tokens; NaN without any."""
    if not len(arrived):
        return arrived, arrived
    edges = np.linspace(arrived.min(), arrived.max() + 1e-9, bins + 1)
    number = np.clip(np.digitize(arrived, edges) - 1, 0, bins - 1)
    sent = np.bincount(number, prompt, bins)
    reused = np.bincount(number, cached, bins)
    return edges[:-1], np.divide(reused, sent, out=np.full(bins, np.nan), where=sent > 0)
