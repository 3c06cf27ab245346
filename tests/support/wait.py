"""Waiting for conditions instead of fixed times."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")
PATIENCE_S = 60.0  # longer than any wait on the slowest machine


@overload
async def eventually(
    check: Callable[[], Awaitable[T]], timeout: float = PATIENCE_S, what: str = ""
) -> T: ...
@overload
async def eventually(check: Callable[[], T], timeout: float = PATIENCE_S, what: str = "") -> T: ...
async def eventually(
    check: Callable[[], T | Awaitable[T]], timeout: float = PATIENCE_S, what: str = ""
) -> T:
    """Poll `check` until it returns something true; raises AssertionError after `timeout` seconds.

    Assertion errors inside `check` count as "not yet"; the last one is shown on failure.
    """
    deadline = time.monotonic() + timeout
    result: object = None
    failure = ""
    while True:
        try:
            value = check()
            result = await value if inspect.isawaitable(value) else value
            if result:
                return result
            failure = ""
        except AssertionError as error:
            # as text: the error holds this frame, so it would stay until the garbage is collected,
            # in any later test, which would then be charged with a response left open
            failure = repr(error)
        if time.monotonic() > deadline:
            shown = failure or repr(result)
            raise AssertionError(f"not within {timeout:g} s: {what or check}: {shown}")
        await asyncio.sleep(0.02)
