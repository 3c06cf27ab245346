"""Memory that a process has freed, but that the C library keeps."""

import ctypes


def give_back() -> None:
    """Give free memory back to the system, where the C library can (glibc).

    To be called after work that frees much of what it took, such as a start: takes some 5 ms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
