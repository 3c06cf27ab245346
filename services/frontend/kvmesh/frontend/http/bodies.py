"""Reading request bodies and writing short answers, for every endpoint."""

import asyncio
import codecs
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestPayloadError

from kvmesh.frontend import metrics
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.json_bounds import check_values
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)
T = TypeVar("T")
LARGE = 128 << 10
JSON = "application/json"


class ErrorShape(Protocol):
    """An API's own form of errors."""

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Status and body."""
        ...


async def read_body(http: web.Request, settings: FrontendSettings) -> bytes:
    """The body; refuses one that is too large, too slow to come, or no text."""
    limit = settings.max_body_bytes
    try:
        if (http.content_length or 0) > limit:
            raise _too_large(limit)
        if http.content.is_eof():
            body = http.content.read_nowait()
        else:
            async with asyncio.timeout(settings.body_timeout_s):
                body = await _gathered(http.content, limit)
    except TimeoutError:
        raise InvalidRequest("The body did not arrive in time.") from None
    except RequestPayloadError as error:
        reason = " ".join(str(error).partition("message:")[2].split())
        raise InvalidRequest(f"The body cannot be read: {reason or error}.") from error
    if len(body) > limit:
        raise _too_large(limit)
    await check_text(body)
    return body


async def _gathered(content: StreamReader, limit: int) -> bytes:
    """All of it, or a part that is longer than `limit`."""
    content.set_read_chunk_size(limit)
    blocks, size = [], 0
    while size <= limit and (block := await content.readany()):
        blocks.append(block)
        size += len(block)
    return b"".join(blocks)


async def parsed(threads: FairThreads, owner: str, body: bytes, parse: Callable[[], T]) -> T:
    """Parse a body, in a thread if it may take long; raises what `parse` raises."""
    if len(body) < LARGE:
        return parse()
    return await threads.call(owner, lambda: _parsed(body, parse))


async def checked(threads: FairThreads, owner: str, body: bytes) -> None:
    """Refuse a body that may not be decoded at once."""
    if len(body) >= LARGE:
        await threads.call(owner, lambda: check_values(body))


def _parsed(body: bytes, parse: Callable[[], T]) -> T:
    check_values(body)
    return parse()


def _too_large(limit: int) -> ApiError:
    return ApiError("too_large", f"The body is larger than {limit} bytes.")


async def check_text(body: bytes) -> None:
    """JSON decoders do not look into what they skip; it may still be stored and sent on."""
    if body.isascii():
        return
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(body), LARGE):
            decode(body[start : start + LARGE])
            await asyncio.sleep(0)
        decode(b"", True)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8: {error.reason}.") from None


def refuse(shape: ErrorShape, error: ApiError) -> web.Response:
    """An answer that is only an error."""
    status, body = shape.error(error)
    metrics.rejections.labels(error.kind).inc()
    if status >= 500:
        log.warning("answered %d: %s", status, error.message)
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.fatal:
        headers["X-Should-Retry"] = "false"  # which the SDKs of both APIs obey
    return web.Response(status=status, body=body, headers=headers, content_type=JSON)


def unexpected(error: Exception) -> ApiError:
    """A defect of this server, logged with its cause; the client learns only that it happened.

    Python's limit of recursion is no defect: it ends what is nested beyond all reason.
    """
    if isinstance(error, RecursionError):
        return InvalidRequest("The body is nested too deeply.")
    log.error("an unexpected error", exc_info=error)
    return ApiError("internal", "The server made an error; it has been logged.")
