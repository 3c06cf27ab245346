"""The file of an image: from its URL to bytes that a model can read. Pure."""

import base64
import binascii
import warnings
from io import BytesIO

from PIL import ExifTags
from PIL import Image as Pillow

from kvmesh.frontend.apis.content.files import split_data_url

LAST_UPRIGHT = 4  # orientation; the others turn the image by a quarter
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class ImageRefused(Exception):
    """The image cannot be shown to a model; the text ends a sentence about it."""


def data_of(url: str) -> bytes:
    """The bytes of a data URL; raises ImageRefused."""
    _, data = split_data_url(url)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ImageRefused("its data URL is not base64") from None


def size_of(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Width and height of an image as it is shown; of an animation, its first picture.

    Raises ImageRefused for one that cannot be decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of images that are too large, as checked here
            with Pillow.open(BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise ImageRefused(
                        f"it has {width} x {height} pixels, and {max_pixels} may be"
                        " (frontend.max_image_pixels)"
                    )
                image.load()
                if image.getexif().get(ExifTags.Base.Orientation, 1) > LAST_UPRIGHT:
                    width, height = height, width
    except ImageRefused:
        raise
    except Exception:  # Pillow raises any type for malformed files
        raise ImageRefused(f"it is no whole image of the kinds {', '.join(FORMATS)}") from None
    return width, height
