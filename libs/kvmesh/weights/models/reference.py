"""Names of models in the mesh: NAME, or NAME@DIGEST."""

import re
from typing import NamedTuple

from kvmesh.weights.errors import ModelStoreError

MIN_DIGITS = 12  # of an abbreviated digest
MAX_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_DIGEST = re.compile(rf"[0-9a-f]{{{MIN_DIGITS},64}}")


class ModelReference(NamedTuple):
    """A model, and the beginning of the digest of one revision; empty: any."""

    name: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else self.name


def parse_reference(text: str) -> ModelReference:
    """The reference in a text; raises ModelStoreError."""
    name, at, digest = text.partition("@")
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ModelStoreError(f"{text!r} is no name of a model")
    if at and not _DIGEST.fullmatch(digest):
        raise ModelStoreError(f"{digest!r} is no digest: {MIN_DIGITS} to 64 digits of 0-9 and a-f")
    return ModelReference(name, digest)
