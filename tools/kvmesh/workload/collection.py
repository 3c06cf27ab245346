"""A pause of Python's search for cycles of objects that nothing uses."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the search, for work that makes many objects and hardly any cycles.

    It would search all objects again and again: a third of the time of reading a trace. Afterwards
    these objects count as old ones, so that none is searched before the next full search.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else what a process shares with its forks would thaw
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
