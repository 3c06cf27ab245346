"""Reads request bodies within limits of size, time and nesting; writes error responses."""

import asyncio
import codecs
import logging
from collections.abc import Callable
from typing import TypeVar

from aiohttp import StreamReader, hdrs, web
from aiohttp.web_protocol import RequestPayloadError

from kvmesh.bus.errors import BusError, cause
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import ErrorShape
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable
from kvmesh.frontend.failure_log import log_failure
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.intake.codings import coding_of, decode_steps
from kvmesh.frontend.json_bounds import check_values
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)
T = TypeVar("T")
LARGE = 128 << 10  # bytes from which stored items are handled in a thread
JSON = "application/json"


async def read_body(
    http: web.Request,
    settings: FrontendSettings,
    threads: FairThreads,
    owner: str,
    limit: int | None = None,
) -> bytes:
    """The decoded body, without a byte order mark; `limit` replaces `max_body_bytes`.

    Raises ApiError if it is too large, too slow to arrive, or in a wrong coding.
    """
    timeout_s = settings.body_timeout_s
    if limit is None:
        limit = settings.max_body_bytes
    else:
        timeout_s = upload_timeout_s(settings, limit)
    codings = http.headers.getall(hdrs.CONTENT_ENCODING, ())
    coding = coding_of(codings) if codings else None
    if (http.content_length or 0) > limit:
        raise too_large(limit)
    if http.content.is_eof():
        body = http.content.read_nowait()
    else:
        await invite(http)
        body = await _receive(http.content, limit, timeout_s)
    if len(body) > limit:
        raise too_large(limit)
    # aiohttp holds the queue of a body, which is at its end, as long as the answer
    http.content._buffer = ()  # type: ignore[assignment]
    if coding is not None:
        body = await threads.run_steps(owner, decode_steps(body, coding, limit), at_once=False)
    if body.startswith(codecs.BOM_UTF8):
        body = body[len(codecs.BOM_UTF8) :]
    return body


async def awaits_reader(_: web.Request) -> None:
    """Expect handler: a client that waits for leave to send gets it once its body is read."""


def upload_timeout_s(settings: FrontendSettings, limit: int) -> float:
    """The longest time to receive `limit` bytes: in proportion to those of a body."""
    return settings.body_timeout_s * max(1.0, limit / settings.max_body_bytes)


async def invite(http: web.Request) -> None:
    """Tell a client that waits for leave to send its body to do so."""
    if http.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # the answer has not begun


async def _receive(content: StreamReader, limit: int, timeout_s: float) -> bytes:
    """The whole content, or a part longer than `limit`."""
    content.set_read_chunk_size(limit)
    blocks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while size <= limit and (block := await content.readany()):
                blocks.append(block)
                size += len(block)
    except TimeoutError:
        raise InvalidRequest("The body did not arrive in time.") from None
    except RequestPayloadError as error:
        reason = " ".join(str(error).partition("message:")[2].split())
        raise InvalidRequest(f"The body cannot be read: {reason or error}.") from error
    return b"".join(blocks)


async def parse_heavy(threads: FairThreads, owner: str, body: bytes, parse: Callable[[], T]) -> T:
    """Parse a body that is not light in a thread and with bounds; raises what `parse` raises."""
    return await threads.call(owner, lambda: _parse_bounded(body, parse))


def _parse_bounded(body: bytes, parse: Callable[[], T]) -> T:
    check_values(body)
    return parse()


def too_large(limit: int) -> ApiError:
    """The error for a body of more bytes."""
    return ApiError("too_large", f"The body is larger than {limit} bytes.")


async def check_utf8(body: bytes) -> None:
    """Raises InvalidRequest unless the body is UTF-8.

    JSON decoders do not check the fields that they skip, which may still be stored and forwarded.
    """
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(body), LARGE):
            decode(body[start : start + LARGE])
            await asyncio.sleep(0)
        decode(b"", True)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8: {error.reason}.") from None


def error_response(shape: ErrorShape, error: ApiError, request_id: str) -> web.Response:
    """The response to a failed request."""
    status, body = shape.error(error, request_id)
    metrics.rejections.labels(error.kind).inc()
    if status >= 500:
        log_failure(error.kind, request_id, f"status {status}, {error.message}")
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.fatal:
        headers["X-Should-Retry"] = "false"  # obeyed by the SDKs of both vendors
    return web.Response(status=status, body=body, headers=headers, content_type=JSON)


def internal_error(error: Exception, request_id: str) -> ApiError:
    """The error of an unexpected exception, which is logged and not shown to the client.

    A RecursionError is the client's fault: its body is nested too deeply. One of the bus may pass,
    and another frontend may have other permissions.
    """
    if isinstance(error, RecursionError):
        return InvalidRequest("The body is nested too deeply.")
    if isinstance(error, BusError):
        log.error("request %s: %s", request_id, cause(error))
        text = "The message bus does not carry this request now; see the server's log."
        return Unavailable(text)
    log.error("request %s: unexpected error", request_id, exc_info=error)
    return ApiError("internal", "Internal server error; see the server's log.")
