"""The reply subjects of deliveries, in both layouts."""

import pytest

from kvmesh.bus.connection.ack_subject import delivery_fields, in_older_layout

FIELDS = ["S", "c", "1", "7", "3", "1795936970328198495", "199"]


@pytest.mark.parametrize("before", ["$JS.ACK.", "$JS.ACK._.szMpdrwD.", "$JS.ACK.hub.szMpdrwD."])
def test_both_layouts_have_the_same_fields(before: str) -> None:
    reply = before + ".".join(FIELDS)
    assert delivery_fields(reply)[:7] == FIELDS
    assert in_older_layout(reply.encode()) == ("$JS.ACK." + ".".join(FIELDS)).encode()


def test_a_random_last_token_is_no_field() -> None:
    reply = f"$JS.ACK._.hash.{'.'.join(FIELDS)}.x3Fa"
    assert delivery_fields(reply)[:7] == FIELDS
    assert in_older_layout(reply.encode()) == ("$JS.ACK." + ".".join(FIELDS)).encode()
