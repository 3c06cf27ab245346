"""Results of the queue model, corrected by simulations of other fleets."""

from math import exp, inf, log

from kvmesh.planner.core.fleets import Kept

LEAST_ODDS = 1e-4


def corrected(own: Kept, nearest: Kept, simulated: Kept) -> Kept:
    """The result `own` of the queue model, corrected by what a simulation differs from it.

    `nearest` is the queue model's result for the simulated fleet. Shares move by the ratio of their
    odds, so that they stay between 0 and 1; quantiles by the ratio of the times.
    """
    return Kept(
        tuple(map(_moved, own.shares, nearest.shares, simulated.shares)),
        tuple(
            value * after / before if 0 < before < inf and after < inf else value
            for value, before, after in zip(
                own.quantiles, nearest.quantiles, simulated.quantiles, strict=True
            )
        ),
        own.busy,
    )


def _moved(share: float, modelled: float, simulated: float) -> float:
    if modelled == simulated:
        return share
    return 1 / (1 + exp(-(_log_odds(share) + _log_odds(simulated) - _log_odds(modelled))))


def _log_odds(share: float) -> float:
    bounded = min(max(share, LEAST_ODDS), 1 - LEAST_ODDS)
    return log(bounded / (1 - bounded))
