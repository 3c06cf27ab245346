"""The search for texts in a rendered prompt takes a bounded number of scans."""

from typing import Any

import pytest

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.conversation import CacheControl, GenerateRequest, Message, Text
from kvmesh.frontend.preprocess.prompt_spans import locate_spans


class Counted(str):
    """A prompt that counts the characters scanned by `find` and `rfind`."""

    scanned = 0

    def find(self, part: str, start: Any = 0, end: Any = None) -> int:
        offset = super().find(part, start, end)
        self.scanned += (end if offset < 0 else offset) - start
        return offset

    def rfind(self, part: str, start: Any = 0, end: Any = None) -> int:
        offset = super().rfind(part, start, end)
        self.scanned += end - (start if offset < 0 else offset)
        return offset


@pytest.mark.parametrize("hidden", ["short", "a long text that is nowhere " * 100_000])
def test_absent_texts_cost_a_bounded_number_of_scans(hidden: str) -> None:
    text = Counted("a " * 1_000_000)
    marked = [Text(f"{hidden}{n}", cache=CacheControl(300.0)) for n in range(200)]
    messages = [Message("user", [block]) for block in marked]
    request = GenerateRequest(id="r", model="m", sampling=Sampling(max_tokens=0), messages=messages)
    locate_spans(request, text, [0, len(text)], drops_thinking=False)
    assert text.scanned < 10 * len(text)
