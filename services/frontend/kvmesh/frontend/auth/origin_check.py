"""Detects requests to a loopback frontend that web pages of other origins have caused. Pure."""

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

FORM_CONTENT_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def cross_origin_fault(
    method: str, headers: Mapping[str, str], allowed: bool = False
) -> str | None:
    """Reason to refuse a request as cross-origin or proxied; None if it may be local.

    `allowed`: pages of its origin may call the API.
    """
    host = headers.get("host", "")
    if host and not is_loopback(f"//{host}"):
        return f"Host `{host}` is not a loopback name; configure API keys to allow it."
    for name in PROXY_HEADERS:
        if name in headers:
            return "Requests through a proxy require API keys; none are configured."
    if allowed:
        return None
    origin = headers.get("origin")
    if origin is not None and not is_loopback(origin):
        return f"Requests from the origin `{origin}` require API keys; none are configured."
    if headers.get("sec-fetch-site") == "cross-site":
        return "Cross-site requests require API keys; none are configured."
    return None


def form_fault(method: str, headers: Mapping[str, str]) -> str | None:
    """Reason to refuse a POST that a page of any origin may send without a preflight, as a form."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind in FORM_CONTENT_TYPES:
        return (
            f"Content type `{kind}` is not accepted without API keys, since any web page may send"
            " it; send `Content-Type: application/json` (curl: --json in place of -d)."
        )
    return None


@lru_cache(maxsize=64)
def is_loopback(url: str) -> bool:
    """True if a URL's host is a loopback name or address."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or host.endswith(".localhost") or ip_address(host).is_loopback
    except ValueError:
        return False
