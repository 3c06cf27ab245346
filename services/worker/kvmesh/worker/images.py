"""The files of images that a worker keeps for its requests, and their places in prompts."""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from kvmesh.bus.messages import PromptImage, PutImage
from kvmesh.runtime.lru import LruCache
from kvmesh.worker.engine import EngineError, Rejected
from kvmesh.worker.model_folder import read_json

MAX_BYTES = 256 << 20
MAX_PIXELS = 1 << 26  # of an image to measure


class ImageStore:
    """The files that were used last, `max_bytes` in all."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._files: LruCache[bytes, bytes] = LruCache(max_bytes, lambda _, data: len(data))

    def put(self, image: PutImage) -> None:
        """Keep a file; raises EngineError if it is not the one that its digest names."""
        if sha256(image.data).digest() != image.digest or not image.data:
            raise EngineError("the digest of the image is another one")
        if not self._files.put(image.digest, image.data):
            raise EngineError(f"the image has {len(image.data)} bytes, more than all may have")

    def missing(self, images: Sequence[PromptImage]) -> list[bytes]:
        """The digests of the files that are not here; the others are the last to leave."""
        digests = dict.fromkeys(image.digest for image in images)
        return [digest for digest in digests if self._files.get(digest) is None]

    def files(self, images: Sequence[PromptImage]) -> list[bytes]:
        """The files of images, in order; raises Rejected if one has left."""
        found = [self._files.get(image.digest) for image in images]
        if None in found:
            raise Rejected("the file of an image is no longer stored here")
        return [file for file in found if file is not None]


def check_measured(width: int, height: int) -> None:
    """Raise EngineError for a size that no image may have."""
    if not (width > 0 < height and width * height <= MAX_PIXELS):
        raise EngineError(f"invalid: an image cannot have {width} x {height} pixels")


def with_placeholders(packed: bytes, images: Sequence[PromptImage], token: int) -> list[int]:
    """The tokens of a prompt with one `token` in the place of those of each image."""
    tokens, found, before = array("I", packed), list[int](), 0
    for image in images:
        found += tokens[before : image.start]
        found.append(token)
        before = image.start + image.length
    return found + tokens[before:].tolist()


def placeholder_of(folder: Path) -> tuple[int, str] | None:
    """The token that stands for an image by config.json: its id and text; None if it has none."""
    config = read_json(folder / "config.json")
    token = config.get("image_token_id", config.get("image_token_index"))
    added = read_json(folder / "tokenizer.json").get("added_tokens", ())
    return next(((token, str(each["content"])) for each in added if each["id"] == token), None)
