"""Files in bodies: the text of those that are text."""

import base64
import binascii

PDF = "PDF document"
_KINDS = {"image": "image", "audio": "audio file", "video": "video"}


def text_of(data: str, media_type: str) -> str | None:
    """The text of base64 `data`; None unless its type says text."""
    if not media_type.startswith("text/") and media_type != "application/json":
        return None
    try:
        return base64.b64decode(data, validate=True).decode(errors="replace")
    except (binascii.Error, ValueError):
        return None


def split_data_url(url: str) -> tuple[str, str]:
    """Media type and data of `data:TYPE;base64,DATA`; the type is empty without that prefix."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:"):
        return "", url
    return head[5:].partition(";")[0], data


def file_kind(type_name: str) -> str | None:
    """The kind of a file in words that the type of a part names (`video_url`); None if none."""
    return next((kind for word, kind in _KINDS.items() if word in type_name), None)


def kind_of(media_type: str, name: str) -> str:
    """The kind of a file in words."""
    if media_type == "application/pdf" or name.lower().endswith(".pdf"):
        return PDF
    return _KINDS.get(media_type.partition("/")[0], "file")
