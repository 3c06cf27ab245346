"""The turn of a placed prompt on its rank: the router holds it until then (ADR 48)."""

from math import sqrt

HOLD_S = 2.0  # at most: an engine that takes longer for a prompt has it in its own queue
YIELD_S = 0.25  # a prompt goes as if it had arrived so much later for each step that it fills
FIXED_SHARE = 0.125  # the fixed time of an engine step, in tokens of prefill, over its most tokens


def yielded_s(tokens: float, step: float) -> float:
    """Seconds by which a prompt lets later ones pass, with steps of so many tokens."""
    return min(YIELD_S * tokens / step, HOLD_S)


def fixed_tokens(step: float, decode_tokens: float = 0.0) -> float:
    """Prompt tokens that take as long as a step takes besides its prompts.

    An empty step is as long as a share of its most tokens, `step`. The time in which one token of
    each answer is generated, that of `decode_tokens` more, counts twice: a prompt that is sent
    after the end of the one before misses the step that has begun, and waits for its end.
    """
    return step * FIXED_SHARE + 2 * decode_tokens


def has_turn(tokens: float, sent: float, waiting: float, fixed: float) -> bool:
    """True if a prompt may be sent to an engine with `sent` tokens to compute.

    `waiting` are all tokens that wait for the rank, sent ones and this prompt included. n tokens
    in steps of s tokens, each of which takes as long as f more tokens, are computed in the least
    mean time with s = √(n · f). `fixed` is f.
    """
    return sent <= 0 or sent + tokens <= sqrt(waiting * fixed)
