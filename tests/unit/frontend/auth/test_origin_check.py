"""Requests that web pages of other origins cause."""

import pytest

from kvmesh.frontend.auth.origin_check import cross_origin_fault, form_fault


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "localhost"},
        {"host": "[::1]:8000", "content-type": "application/json"},
        {"host": "localhost:1", "origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"content-type": "application/json; charset=utf-8"},
    ],
)
def test_local_programs_are_admitted(headers: dict[str, str]) -> None:
    assert cross_origin_fault("POST", headers) is form_fault("POST", headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost", "origin": "https://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost", "sec-fetch-site": "cross-site"},
        {"host": "localhost", "x-forwarded-for": "203.0.113.9"},
    ],
)
def test_web_pages_of_other_origins_are_refused(headers: dict[str, str]) -> None:
    assert cross_origin_fault("POST", headers) is not None


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_forms_are_refused_by_their_content_type(kind: str) -> None:
    headers = {"host": "localhost", "content-type": kind}
    assert cross_origin_fault("POST", headers) is None
    assert "application/json" in (form_fault("POST", headers) or "")
    assert form_fault("GET", headers) is None
