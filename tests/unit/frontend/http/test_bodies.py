"""Request bodies: UTF-8 across the slices in which they are checked."""

import pytest

from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.bodies import LARGE, check_utf8


@pytest.mark.parametrize("place", [0, LARGE - 1, LARGE, 2 * LARGE + 3])
async def test_a_large_body_must_be_utf8_across_slices(place: int) -> None:
    text = ("x" * place + "é🦀" * LARGE).encode()
    await check_utf8(text)
    for bad in (text[:place] + b"\xff" + text[place:], text[:-1]):
        with pytest.raises(InvalidRequest, match="not valid UTF-8"):
            await check_utf8(bad)
