"""Weights of a placement's effects in its cost, in blocks or tokens of prefill (ADR 44)."""

STALL_WEIGHT = 0.3  # of a request's delay by another's prefill, relative to a later first token
DECODE_WEIGHT = 0.05  # of an active block on an empty rank
CROWD_WEIGHT = 8.0  # more, times the square of the share of the usable blocks in use, but
MOST_CROWD_WEIGHT = 0.5  # at most this: past it, hits matter more
