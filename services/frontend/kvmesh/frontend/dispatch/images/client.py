"""Asks workers for the tokens of images, and sends them the files that they lack."""

import asyncio
import secrets
from collections.abc import Callable, Sequence

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.messages import MeasureImage, ModelCard, PutImage, Role
from kvmesh.frontend.dispatch.control_client import ControlClient
from kvmesh.frontend.errors import Unavailable
from kvmesh.frontend.preprocess.images.files import ImageRefused
from kvmesh.frontend.wake.waker import Waker
from kvmesh.runtime.lru import LruCache

SIZES = 1 << 16  # of images, whose tokens are remembered
MEASURE_S = 12.0  # longer than a worker takes for a command
TRIES = 3
ENVELOPE = 4096  # bytes of a message beside the file of an image
INVALID = "invalid: "


class ImageClient:
    """`data` returns the file of an image that a request of this frontend holds.

    A model without workers is waited for as long as `wake_timeout_s` returns.
    """

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        waker: Waker,
        wake_timeout_s: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._waker = waker
        self._wake_timeout_s = wake_timeout_s
        self._control = ControlClient(bus, directory)
        self._lengths: LruCache[tuple[str, str, str, int, int], int] = LruCache(SIZES)
        self.data: Callable[[bytes], bytes | None] = lambda _: None

    def max_file(self) -> int:
        """The bytes of the largest file that fits into a message."""
        return self._bus.max_payload - ENVELOPE

    async def measure(self, card: ModelCard, width: int, height: int) -> int:
        """The tokens of an image in a prompt of a model, which one of its workers is asked for.

        Raises ImageRefused if the model takes none of this size, Unavailable without a reply.
        """
        key = card.name, card.files, card.image_placeholder, width, height
        if (known := self._lengths.get(key)) is not None:
            return known
        if self._waker.is_idle(card.name):
            deadline = asyncio.get_running_loop().time() + self._wake_timeout_s()
            await self._waker.wait(card.name, f"image-{secrets.token_hex(8)}", 0, deadline)
        reason = "no worker serves it now"
        for instance in self._workers(card)[:TRIES]:
            command = MeasureImage(width, height)
            reply = await self._control.request(instance, command, MEASURE_S)
            if reply.ok and reply.tokens > 0:
                self._lengths.put(key, reply.tokens)
                return reply.tokens
            reason = reply.reason
            if reason.startswith(INVALID):
                raise ImageRefused(reason.removeprefix(INVALID))
        raise Unavailable(f"No worker of `{card.name}` has measured an image: {reason}")

    async def send(self, instance: str, digests: Sequence[bytes]) -> str:
        """Send a worker the files that it lacks; the reason if one of them does not arrive."""
        for digest in digests:
            data = self.data(digest)
            if data is None:
                return "the file of an image is no longer here"
            reply = await self._control.request(instance, PutImage(digest, data))
            if not reply.ok:
                return reply.reason
        return ""

    def _workers(self, card: ModelCard) -> list[str]:
        """Instances that serve the model with these files, those that accept work first."""
        found = [
            each
            for each in self._directory.instances
            if each.role is Role.WORKER
            and each.model is not None
            and (each.model.name, each.model.files) == (card.name, card.files)
            and each.model.image_placeholder
        ]
        return [each.instance for each in sorted(found, key=lambda each: not routable(each))]
