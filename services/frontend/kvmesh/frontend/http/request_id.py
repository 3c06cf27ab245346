"""The id of each HTTP request: in its answer, its headers, its errors, logs and bus messages."""

import os
import re
import time
from collections.abc import Mapping

from aiohttp import web

from kvmesh.frontend.apis.base import RequestStamp

HEADER = "X-Request-Id"  # read by the OpenAI SDK, and sent and logged by most proxies
ANTHROPIC_HEADER = "request-id"  # read by the Anthropic SDK
CLIENT_HEADERS = (HEADER, "X-Client-Request-Id")  # the second is OpenAI's name of a client's own id
PREFIX = "req_"
_STAMP = web.RequestKey("stamp", RequestStamp)
_ID = web.RequestKey("id", str)
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/@+=~#-]{1,128}")


def new_stamp() -> RequestStamp:
    """A random token, and the present time."""
    return RequestStamp(os.urandom(12).hex(), int(time.time()))


def assign(http: web.Request, prefix: str) -> None:
    """Give the request its id, of which `prefix` names the kind."""
    stamp = http[_STAMP] = new_stamp()
    http[_ID] = prefix + stamp.token


def stamp_of(http: web.Request) -> RequestStamp:
    """The token from which the ids of the answer derive, and the time of arrival."""
    return http[_STAMP]


def id_of(http: web.BaseRequest) -> str:
    """The request's id; one without a route gets it here."""
    if _ID not in http:
        http[_ID] = PREFIX + os.urandom(12).hex()
    return http[_ID]


def client_id(headers: Mapping[str, str]) -> str:
    """The client's own id of the request: at most 128 plain characters, or empty."""
    for name in CLIENT_HEADERS:
        value = headers.get(name)
        if value and _CLIENT_ID.fullmatch(value):
            return value
    return ""


def headers_of(http: web.BaseRequest) -> dict[str, str]:
    """The headers with the request's id; a client's own id returns in `HEADER`."""
    own = id_of(http)
    return {HEADER: client_id(http.headers) or own, ANTHROPIC_HEADER: own}


async def add_headers(http: web.Request, response: web.StreamResponse) -> None:
    """Signal handler that puts the id on every response, streams and errors included."""
    response.headers.update(headers_of(http))
