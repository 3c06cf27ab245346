"""Addresses that `kvmesh up` announces."""

from pathlib import Path

import pytest

from kvmesh.cli.supervisor import ready


@pytest.mark.parametrize(
    ("listened", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7")]
)
def test_reachable_addresses_of_listeners(listened: str, reached: str) -> None:
    assert ready.reachable(listened) == reached


def test_the_announcement_names_every_port() -> None:
    text = ready.announcement("::1", [8000, 8001], ["demo"], "nats://h:1", "none")
    assert "OPENAI_BASE_URL=http://[::1]:8000/v1" in text
    assert "and ports 8001" in text
    assert '"model": "demo"' in text
    assert "OPENAI_API_KEY=none" in text
    assert "Bearer" not in text
    assert "no model yet" in ready.announcement("h", [1], [], "", "none")


def test_the_announcement_says_how_to_look_inside() -> None:
    file = Path("/a b/nats.token")
    text = ready.announcement("h", [1], [], "nats://127.0.0.1:4223", "none", file)
    assert "kvmesh status --nats nats://127.0.0.1:4223 --nats-token-file '/a b/nats.token'" in text
