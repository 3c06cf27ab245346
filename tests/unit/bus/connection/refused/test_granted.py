"""The subjects that a server's statement of permissions lacks."""

from typing import Any

import msgspec
import pytest

from kvmesh.bus.connection.refused.granted import lacking
from kvmesh.bus.permissions import Permissions

WANTED = Permissions(("a.*.c", "_INBOX.>"), ("d.>",))
NOTHING = Permissions((), ())


def stated(**permissions: Any) -> bytes:
    return msgspec.json.encode({"server": {}, "data": {"user": "u", "permissions": permissions}})


@pytest.mark.parametrize(
    ("permissions", "lacks"),
    [
        ({}, NOTHING),
        ({"publish": {"allow": ["a.>", "_INBOX.>"]}, "subscribe": {"allow": [">"]}}, NOTHING),
        ({"publish": {"allow": ["a.b.c", "_INBOX.>"]}}, Permissions(("a.*.c",), ())),
        ({"publish": {"deny": ["a.b.c"]}}, NOTHING),  # a part
        ({"publish": {"deny": ["a.>"]}}, Permissions(("a.*.c",), ())),
        ({"publish": {"allow": ["a.>"]}, "responses": {"max": 1}}, NOTHING),
        ({"publish": {"allow": ["a.>"]}}, Permissions(("_INBOX.>",), ())),
        ({"subscribe": {"allow": ["d.*"]}}, Permissions((), ("d.>",))),
        ({"subscribe": {"allow": ["d.> group"]}}, NOTHING),
    ],
)
def test_a_row_is_lacking_that_no_rule_permits_wholly(
    permissions: dict[str, Any], lacks: Permissions
) -> None:
    assert lacking(stated(**permissions), WANTED) == lacks


def test_a_user_without_rules_may_do_everything() -> None:
    assert lacking(b'{"data": {"user": "u"}}', WANTED) == NOTHING
