"""Reads the images of a conversation and finds out how many tokens each has in its prompt."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from hashlib import sha256
from weakref import WeakValueDictionary

from kvmesh.bus.messages import ModelCard
from kvmesh.frontend.conversation import (
    GenerateRequest,
    Image,
    ImageFile,
    Message,
    ShownImage,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.preprocess.images.fetch import ImageFetcher
from kvmesh.frontend.preprocess.images.files import ImageRefused, data_of, size_of
from kvmesh.runtime.lru import LruCache
from kvmesh.settings.schema import FrontendSettings

KEPT_BYTES = 64 << 20  # of files that no request holds any more
REQUEST_BYTES = 64 << 20  # of all images of a request, far below what a worker keeps
LONG_URL = 64 << 10  # characters from which a URL is decoded in a thread
Measure = Callable[[ModelCard, int, int], Awaitable[int]]


class ImageLoader:
    """Loads images within the limits of `settings` and `max_message`, bytes of a message.

    `measure` returns the tokens that a model has for a size; it raises ImageRefused. A file is kept
    while a request holds it, and the last KEPT_BYTES longer, so that a turn decodes only new ones.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        threads: FairThreads,
        measure: Measure,
        max_message: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._measure = measure
        self._max_message = max_message
        self._fetcher = ImageFetcher(settings.image_hosts)
        self._files: WeakValueDictionary[bytes, ImageFile] = WeakValueDictionary()
        # by tenant, so that none learns from the time what another has sent
        self._kept: LruCache[tuple[str, bytes | str], ImageFile] = LruCache(
            KEPT_BYTES, lambda _, file: len(file.data)
        )

    def data(self, digest: bytes) -> bytes | None:
        """The bytes of a file that a request holds."""
        file = self._files.get(digest)
        return None if file is None else file.data

    async def load(self, request: GenerateRequest, card: ModelCard) -> None:
        """Set `request.images`; raises InvalidRequest for more images than a request may have."""
        request.images = {}
        if not card.image_placeholder:
            return
        urls = [image.url for image in images_of(request.messages)]
        field, most = request.content_field, self._settings.max_images
        if len(urls) > most:
            reason = f"`{field}`: {len(urls)} images; at most {most} (frontend.max_images)."
            raise InvalidRequest(reason, field, "too_many_images")
        wanted = [*dict.fromkeys(urls)]
        found = await asyncio.gather(*(self._shown(url, request, card) for url in wanted))
        size = sum(len(image.file.data) for image in found if isinstance(image, ShownImage))
        if size > REQUEST_BYTES:
            reason = f"`{field}`: the images have {size} bytes; at most {REQUEST_BYTES}."
            raise InvalidRequest(reason, field, "images_too_large")
        request.images = dict(zip(wanted, found, strict=True))

    async def _shown(self, url: str, request: GenerateRequest, card: ModelCard) -> ShownImage | str:
        try:
            file = await self._file(url, request)
            return ShownImage(file, await self._measure(card, file.width, file.height))
        except ImageRefused as refused:
            return str(refused)

    async def _file(self, url: str, request: GenerateRequest) -> ImageFile:
        tenant, owner = request.cache_salt, request.owner
        most = min(self._settings.max_image_bytes, self._max_message())
        if not url.startswith("data:"):
            if (kept := self._kept.get((tenant, url))) is not None:
                return kept
            data = await self._fetcher.fetch(url, most)
            digest = sha256(data).digest()
        elif len(url) < LONG_URL:
            data, digest = _decoded(url)
        else:
            data, digest = await self._threads.call(owner, lambda: _decoded(url))
        if len(data) > most:
            raise ImageRefused(f"it has {len(data)} bytes; at most {most} may be")
        file = self._kept.get((tenant, digest))
        if file is None:
            pixels = self._settings.max_image_pixels
            width, height = await self._threads.call(owner, lambda: size_of(data, pixels))
            file = self._files.get(digest) or ImageFile(digest, data, width, height)
            self._files[digest] = file
            self._kept.put((tenant, digest), file)
        if not url.startswith("data:"):
            self._kept.put((tenant, url), file)
        return file


def _decoded(url: str) -> tuple[bytes, bytes]:
    data = data_of(url)
    return data, sha256(data).digest()


def images_of(messages: Sequence[Message]) -> Iterator[Image]:
    """The images in messages and in their tool results, in order."""
    for message in messages:
        for block in message.blocks:
            if isinstance(block, Image):
                yield block
            elif isinstance(block, ToolResult):
                yield from (part for part in block.content if isinstance(part, Image))
