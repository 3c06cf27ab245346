"""Descriptions of the objects in JetStream's object stores."""

import logging
import re
from typing import NamedTuple

import msgspec
from msgspec import Struct

from kvmesh.bus.errors import ObjectUnreadable

log = logging.getLogger(__name__)
PARTS_NAME = re.compile(r"[A-Za-z0-9_-]+")  # one token of a subject, without wildcards


class ObjectDescription(Struct, omit_defaults=True):
    """The stored description of an object, as far as it is used here."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    mtime: str = ""
    digest: str = ""
    options: dict[str, object] = {}
    deleted: bool | None = None


class StoredObject(NamedTuple):
    """An object of `size` bytes in `parts` parts, which was described at Unix time `stored`."""

    name: str
    nuid: str
    size: int
    parts: int
    version: int
    stored: float


_descriptions = msgspec.json.Decoder(ObjectDescription)


def decoded(data: bytes) -> ObjectDescription:
    """A description; raises ObjectUnreadable if it is malformed."""
    try:
        return _descriptions.decode(data)
    except msgspec.MsgspecError as error:
        raise ObjectUnreadable(f"a malformed description: {error}") from error


def described(data: bytes, version: int, stored: float) -> StoredObject | None:
    """The object of a description; None if it is malformed or says that there is none.

    Whoever may write it chooses all of it: the name of its parts becomes a subject that is purged.
    """
    try:
        found = _descriptions.decode(data)
    except msgspec.MsgspecError as error:
        log.warning("ignored a malformed description of an object: %s", error)
        return None
    if found.deleted:
        return None
    if not PARTS_NAME.fullmatch(found.nuid) or found.size < 0:
        log.warning("ignored the description of an object with parts under %.40r", found.nuid)
        return None
    return StoredObject(found.name, found.nuid, found.size, found.chunks, version, stored)
