"""Options of the load format, as the worker gives them to vLLM's processes."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.weights.answer import WeightsAccess

LOAD_FORMAT = "kvmesh"
KEY = "kvmesh"  # in `model_loader_extra_config`


class LoaderOptions(Struct, frozen=True, kw_only=True):
    """Access to the weights of the model in `folder`."""

    folder: str
    answer_file: str
    directory: str
    max_bytes: int
    keep: bool
    timeout_s: float

    @property
    def access(self) -> WeightsAccess:
        return WeightsAccess(
            answer_file=Path(self.answer_file),
            directory=Path(self.directory),
            max_bytes=self.max_bytes,
            keep=self.keep,
            timeout_s=self.timeout_s,
        )


def loader_options(folder: Path, access: WeightsAccess) -> LoaderOptions:
    """The options for this access to the weights of the model in `folder`."""
    return LoaderOptions(
        folder=str(folder),
        answer_file=str(access.answer_file),
        directory=str(access.directory),
        max_bytes=access.max_bytes,
        keep=access.keep,
        timeout_s=access.timeout_s,
    )


def loader_config(folder: Path, access: WeightsAccess) -> dict[str, Any]:
    """The entry of `model_loader_extra_config`: vLLM passes it on to all of its processes."""
    return {KEY: msgspec.to_builtins(loader_options(folder, access))}
