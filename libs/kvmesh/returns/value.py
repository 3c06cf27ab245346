"""Value of held blocks by age: the returns per second of holding that rates of return promise.

While the rate falls with age, the value is the present rate. A rate that rises later counts before
its time: the value is the greatest number of expected returns per second of holding, over all times
until which the blocks could be held. It is the index by which Gittins orders jobs of unknown length
(doi 10.1111/j.2517-6161.1979.tb01068.x).
"""

from kvmesh._native import chances_by_age, values_by_age
from kvmesh.returns.rates import AGE_ENDS, BINS

__all__ = ["BIN_WIDTHS", "chances_by_age", "values_by_age"]

BIN_WIDTHS = (AGE_ENDS[0], *(AGE_ENDS[k] - AGE_ENDS[k - 1] for k in range(1, BINS)))
