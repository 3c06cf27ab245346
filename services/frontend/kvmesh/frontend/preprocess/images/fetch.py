"""Fetches images by https from the hosts that an operator lists, and from nowhere else."""

import asyncio
import socket
from collections.abc import Collection
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from kvmesh.frontend.preprocess.images.files import ImageRefused

FETCH_S = 10.0
AT_ONCE = 16
OK = 200


def is_public(address: str) -> bool:
    """True for an address of the public internet."""
    try:
        return ip_address(address.partition("%")[0]).is_global
    except ValueError:
        return False


class PublicResolver(AbstractResolver):
    """Resolves names whose addresses are all public; the connection uses these addresses."""

    def __init__(self) -> None:
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._system.resolve(host, port, family)
        if not all(is_public(result["host"]) for result in found):
            raise OSError(f"{host} has a private address")
        return found

    async def close(self) -> None:
        await self._system.close()


class ImageFetcher:
    """Fetches from `hosts`, each HOST or HOST:PORT; at most AT_ONCE files at a time."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = {host.lower() for host in hosts}
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """The file at a URL; raises ImageRefused."""
        try:
            parsed = URL(url)
            host, port = (parsed.host or "").lower(), parsed.port
        except ValueError:
            raise ImageRefused("its URL is malformed") from None
        if parsed.scheme != "https" or parsed.user is not None or not host:
            raise ImageRefused("it has neither a data: nor an https: URL")
        if f"{host}:{port}" not in self._hosts and not (port == 443 and host in self._hosts):
            raise ImageRefused("its host is none of frontend.image_hosts")
        if _is_literal(host) and not is_public(host):
            raise ImageRefused("its host has a private address")
        try:
            async with self._slots, asyncio.timeout(FETCH_S):
                return await _download(parsed, max_bytes)
        except TimeoutError:
            raise ImageRefused(f"its host did not send it within {FETCH_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ImageRefused(f"it cannot be fetched ({type(error).__name__})") from error


async def _download(url: URL, max_bytes: int) -> bytes:
    connector = aiohttp.TCPConnector(resolver=PublicResolver())
    headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
    async with (
        aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
        session.get(url, allow_redirects=False, headers=headers) as response,
    ):
        if response.status != OK:
            raise ImageRefused(f"its host answered with the status {response.status}")
        blocks, size = [], 0
        async for block in response.content.iter_any():
            blocks.append(block)
            size += len(block)
            if size > max_bytes:
                raise ImageRefused(f"it has more than {max_bytes} bytes (frontend.max_image_bytes)")
    return b"".join(blocks)


def _is_literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
