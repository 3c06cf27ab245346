"""Types of the NumPy arrays of the router's core, indexed by slot or by candidate."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.int64]

ZERO = np.zeros(())  # NumPy compares arrays with it faster than with a float


def highest(values: Floats | NDArray[np.uint32]) -> float:
    """The highest of some values, 0 for none: NumPy's own `max` takes three times as long."""
    return float(values[values.argmax()]) if len(values) else 0.0
