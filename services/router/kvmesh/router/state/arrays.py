"""Types of the NumPy arrays of the router's core, indexed by slot or by candidate."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.int64]

ZERO = np.zeros(())  # NumPy compares arrays with it faster than with a float
