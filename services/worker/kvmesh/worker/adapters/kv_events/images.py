"""Images in vLLM's hashes: their identifiers in requests, and back out of its events. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvmesh.bus.messages import PromptImage
from kvmesh.hashing import TOKEN_BYTES, image_tokens

_NAME = re.compile(r"kvm-image-([0-9a-f]{64})-([0-9]{1,9})\Z")  # behind an adapter's name, perhaps


class ImageKey(NamedTuple):
    """An image of the mesh in a block's keys: it begins `offset` tokens behind the block's start.

    A negative offset means that it began in an earlier block.
    """

    digest: bytes
    length: int
    offset: int


def identifier(image: PromptImage) -> str:
    """The name under which vLLM hashes an image; it has all that its events leave out."""
    return f"kvm-image-{image.digest.hex()}-{image.length}"


def image_key(key: Any) -> ImageKey | None:
    """One of the `extra_keys` of a block as an image of the mesh; None if it is another one."""
    if not (isinstance(key, list) and len(key) == 2 and isinstance(key[0], str)):
        return None
    found = _NAME.search(key[0])
    if found is None or type(key[1]) is not int:
        return None
    return ImageKey(bytes.fromhex(found[1]), int(found[2]), key[1])


def with_image_tokens(tokens: bytes, size: int, by_block: Sequence[Any]) -> bytes:
    """Packed tokens of blocks of `size` tokens, with those of the mesh for images in their keys."""
    changed = bytearray(tokens)
    for number, image in _images(by_block):
        start, end = max(image.offset, 0), min(image.offset + image.length, size)
        if start < end:
            ids = image_tokens(image.digest, end - start, skip=start - image.offset)
            at = TOKEN_BYTES * (number * size + start)
            changed[at : at + len(ids)] = ids
    return bytes(changed)


def has_image(by_block: Sequence[Any]) -> bool:
    """True if an image of the mesh is in a block's keys."""
    return next(_images(by_block), None) is not None


def _images(by_block: Sequence[Any]) -> Iterator[tuple[int, ImageKey]]:
    for number, keys in enumerate(by_block):
        for key in keys or ():
            if (image := image_key(key)) is not None:
                yield number, image
