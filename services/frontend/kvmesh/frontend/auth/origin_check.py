"""Whether a request was made by a program of this machine, or by a web page of elsewhere. Pure."""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

SENDABLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
PROXIES = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def foreign(method: str, headers: Mapping[str, str]) -> str | None:
    """The reason why a request is not of this machine; None if nothing speaks against it."""
    host = headers.get("host", "")
    if host and not is_loopback(f"//{host}"):
        return f"Host `{host}` is not a name of this machine's loopback; configure API keys."
    if any(name in headers for name in PROXIES):
        return "Requests through a proxy need API keys; none are configured."
    origin = headers.get("origin")
    if origin is not None and not is_loopback(origin):
        return f"Web pages of `{origin}` may not ask here without API keys."
    if headers.get("sec-fetch-site") == "cross-site":
        return "Web pages of other sites may not ask here without API keys."
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind in SENDABLE:
        return f"A body of type `{kind}` could be a web page's; send application/json."
    return None


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine, by name or number."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or host.endswith(".localhost") or ip_address(host).is_loopback
    except ValueError:
        return False
