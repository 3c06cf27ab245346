"""Names for the NumPy arrays of the router's core, all of them indexed by slot or candidate."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.int64]

ZERO = np.zeros(())  # NumPy compares arrays with it faster than with a float
