"""Streamed answers of an inference server over HTTP."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import aiohttp
from msgspec import Struct

from kvmesh.bus.errors import cause
from kvmesh.settings import redacted
from kvmesh.worker.adapters.request_streams import EngineUnavailable, StreamOutput
from kvmesh.worker.engine import Rejected
from kvmesh.worker.engines.remote.server import message_of

USAGE_S = 2.0
Reader = Callable[[Any], StreamOutput]


class ServerRequest(Struct, frozen=True, kw_only=True):
    """A request to `url`, whose chunks `read` converts.

    `awaits_usage`: the cached tokens come after the chunk that ends the answer.
    """

    url: str
    body: dict[str, Any]
    headers: dict[str, str]
    read: Reader
    awaits_usage: bool = False


async def answer(
    http: aiohttp.ClientSession, request: ServerRequest
) -> AsyncGenerator[StreamOutput, None]:
    """Send a request and yield its output; raises Rejected or EngineUnavailable.

    Closing the generator aborts the request in the server.
    """
    url, read = request.url, request.read
    try:
        async with http.post(url, json=request.body, headers=request.headers) as response:
            await check(response)
            chunks = _events(response)
            async for chunk in chunks:
                output = read(chunk)
                if output.finish is not None and request.awaits_usage:
                    output.cached = await _cached_tokens(chunks, read)
                yield output
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineUnavailable(redacted(f"{url}: {cause(error)}")) from error


async def _cached_tokens(chunks: AsyncIterator[Any], read: Reader) -> int | None:
    """The cached tokens that the rest of a complete answer reports; None if it does not."""
    cached = None
    try:
        async with asyncio.timeout(USAGE_S):
            async for chunk in chunks:
                found = read(chunk).cached
                cached = cached if found is None else found
    except (aiohttp.ClientError, TimeoutError, ValueError, Rejected, EngineUnavailable):
        return cached
    return cached


async def check(response: aiohttp.ClientResponse) -> None:
    """Raise Rejected for errors of the caller or the settings, EngineUnavailable for others."""
    if response.status == 200:
        return
    text = (await response.text())[:2000]
    if response.status in (400, 413, 422):
        raise Rejected(message_of(text) or f"the server replied {response.status}")
    reason = redacted(f"{response.url} replied {response.status}: {message_of(text)}")
    if response.status in (401, 403, 404):  # the worker chooses the key, the model and the address
        raise Rejected(reason, invalid=False)
    raise EngineUnavailable(reason)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Decoded JSON of the server-sent events up to `[DONE]`."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
