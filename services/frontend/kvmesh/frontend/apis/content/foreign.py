"""Texts of what the tools of other servers have returned, and of the sources that answers name.

They are compact and depend on nothing but the object, so that later prompts repeat them. Keys of no
use to a model are left out: types, ids, states and opaque data.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvmesh.frontend.apis.base import as_json

_OPAQUE = frozenset(("type", "id", "status", "cache_control", "signature", "annotations", "caller"))
_HIT = {"title", "url", "page_age"}
_DATA = frozenset(("data", "result", "b64_json", "file_data", "image_url"))
LONGEST = 512  # characters of a text without blanks that may still be words
THOUGHTS = frozenset(("thinking", "reasoning"))  # types of parts that are no text of an answer
_THOUGHT = ("thinking", "reasoning", "text", "content", "summary")
_SOURCES = ("url", "document_title", "title", "filename", "source", "file_id")


def plain_text(value: Any) -> str:
    """The text of any JSON value: texts as they are, hits of a search by title and address."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(plain_text, value)))
    if isinstance(value, dict):
        text = value.get("text")
        if isinstance(text, str):
            return text
        shown = _without_opaque(value)
        if shown.keys() <= _HIT:
            return "\n".join(text for text in shown.values() if isinstance(text, str))
        return as_json(shown)
    return "" if value is None else as_json(value)


def shown_text(value: Mapping[str, Any]) -> str:
    """The text of an object of an unknown type; empty if it has none of the usual forms."""
    for found in (value.get("text"), value.get("content")):
        if isinstance(found, str) and found:
            return found
        if isinstance(found, list):
            parts = (part.get("text") for part in found if isinstance(part, dict))
            if text := "\n".join(part for part in parts if isinstance(part, str)):
                return text
    return ""


def thought_text(part: Mapping[str, Any]) -> str:
    """The text of a part of thinking, as Anthropic, Mistral and client libraries write it."""
    return next(filter(None, (shown_text({"content": part.get(name)}) for name in _THOUGHT)), "")


def _without_opaque(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_opaque(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_opaque(item)
        for key, item in value.items()
        if item is not None
        and key not in _OPAQUE
        and not key.startswith("encrypted_")
        and not (key in _DATA and is_data(item))
    }


def is_data(value: Any) -> bool:
    """True for what is no text, such as an image in base64."""
    return isinstance(value, str) and len(value) > LONGEST and " " not in value


def with_sources(text: str, citations: Iterable[Any] | None) -> str:
    """The text with the addresses or titles that it cites, each once."""
    named = dict.fromkeys(filter(None, map(_source, citations or ())))
    return f"{text} [{', '.join(named)}]" if text and named else text


def _source(citation: Any) -> str:
    if not isinstance(citation, dict):
        return ""
    inner = citation.get("url_citation")
    found = inner if isinstance(inner, dict) else citation
    names = (found.get(key) for key in _SOURCES)
    return next((name for name in names if isinstance(name, str) and name), "")
