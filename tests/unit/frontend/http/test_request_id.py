"""Ids of requests: their own, and those of clients."""

import pytest
from aiohttp.test_utils import make_mocked_request

from kvmesh.frontend.http import request_id


@pytest.mark.parametrize(
    ("header", "value", "taken"),
    [
        ("X-Request-Id", "4bf92f35-77b3/4da6", True),
        ("x-request-id", "a" * 128, True),
        ("X-Client-Request-Id", "mine", True),
        ("X-Request-Id", "a" * 129, False),
        ("X-Request-Id", "a b", False),
        ("X-Request-Id", 'a"b', False),
        ("X-Request-Id", "ä", False),
        ("X-Request-Id", "", False),
    ],
)
def test_a_client_s_own_id_is_taken_if_it_is_plain(header: str, value: str, taken: bool) -> None:
    http = make_mocked_request("POST", "/", headers={header: value})
    assert request_id.client_id(http.headers) == (value if taken else "")


def test_headers_carry_both_ids() -> None:
    http = make_mocked_request("POST", "/", headers={"X-Request-Id": "mine"})
    request_id.assign(http, "msg_")
    own = request_id.id_of(http)
    assert own == "msg_" + request_id.stamp_of(http).token
    assert request_id.headers_of(http) == {"X-Request-Id": "mine", "request-id": own}


def test_a_request_without_a_route_gets_an_id() -> None:
    http = make_mocked_request("GET", "/")
    own = request_id.id_of(http)
    assert own.startswith("req_")
    assert request_id.headers_of(http) == {"X-Request-Id": own, "request-id": own}
