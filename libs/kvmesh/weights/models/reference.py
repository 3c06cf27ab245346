"""Names of models in the mesh: NAME, or NAME@DIGEST."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from kvmesh.weights.errors import ModelStoreError

MIN_DIGITS = 12  # of an abbreviated digest
MAX_NAME = 200
_CACHED = (
    "models--"  # with which a Hugging Face cache begins the folder of a model: models--ORG--NAME
)
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


def name_of_folder(folder: Path) -> str:
    """The name of the model in a folder: the folder's own, or that of a snapshot's model.

    A snapshot in a Hugging Face cache is models--ORG--NAME/snapshots/REVISION.
    """
    path = Path(os.path.abspath(folder))  # a link keeps the name that its user has given it
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith(_CACHED):
        return cached.removeprefix(_CACHED).replace("--", "/")
    return path.name
