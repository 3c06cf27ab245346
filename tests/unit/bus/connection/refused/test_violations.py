"""The permission errors of NATS servers, in the words of each version."""

import pytest

from kvmesh.bus.connection.refused.violations import Violation, violation

SAID = [
    ('publish to "A.b"', Violation(True, "A.b")),
    ('publish with reply of "_R_.x"', Violation(True, "_R_.x", reply=True)),
    ('subscription to "A.>"', Violation(False, "A.>")),
    ('subscription to "A.b" using queue "q"', Violation(False, "A.b")),
    ('subscription to "A.b" (sid "12")', Violation(False, "A.b", 12)),
    ('subscription to "A.b" using queue "q" (sid "12")', Violation(False, "A.b", 12)),
]


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(("said", "meant"), SAID)
def test_every_form_is_understood(said: str, meant: Violation, lowered: bool) -> None:
    text = f"nats: 'Permissions Violation for {said.capitalize() if not lowered else said}'"
    found = violation(text.lower() if lowered else text)
    assert found is not None
    assert found.subject.casefold() == meant.subject.casefold()
    assert (found.publish, found.sid, found.reply) == (meant.publish, meant.sid, meant.reply)


@pytest.mark.parametrize("text", ["", "nats: maximum payload violation", "authorization violation"])
def test_other_errors_are_none(text: str) -> None:
    assert violation(text) is None
