"""Small images for tests, in every format."""

import base64
from io import BytesIO

from PIL import Image

PNG = "image/png"


def image(color: str = "red", size: tuple[int, int] = (64, 48), form: str = "PNG") -> bytes:
    """The file of an image of one colour."""
    file = BytesIO()
    Image.new("RGB", size, color).save(file, form)
    return file.getvalue()


def data_url(file: bytes, media_type: str = PNG) -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"
