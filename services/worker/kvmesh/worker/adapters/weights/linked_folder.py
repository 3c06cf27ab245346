"""A model folder for engines that read one: links to the files of a copy and of the model."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvmesh.weights.answer import WeightsAccess
from kvmesh.weights.checkpoint import INDEX
from kvmesh.worker.adapters.weights.node_copy import NodeCopy
from kvmesh.worker.scratch import ScratchFolder

log = logging.getLogger(__name__)


class LinkedModel:
    """The model in `folder` with the weights of a copy, until `close`."""

    def __init__(self, node: NodeCopy, folder: Path) -> None:
        self._node = node
        self._folder = folder
        self._cleanup = ExitStack()
        self._cleanup.callback(node.close)

    def folder(self) -> Path:
        """A folder with a complete copy, or the model's own if none comes; waits for it."""
        copy = self._node.wait_until_complete()
        if copy is None:
            return self._folder
        into = self._cleanup.enter_context(ScratchFolder()).path / self._folder.name
        try:
            into.mkdir()
            for entry in copy.manifest.files:
                (into / entry.name).symlink_to((copy.folder / entry.name).absolute())
            for path in self._folder.iterdir():
                if path.suffix != ".safetensors" and path.name != INDEX:
                    (into / path.name).symlink_to(path.resolve())
        except OSError as error:
            log.warning("the weights come from %s: %s", self._folder, error)
            return self._folder
        return into

    def close(self) -> None:
        """Remove the folder and end the use of the copy; what maps its memory keeps it."""
        self._cleanup.close()


class LinkedArgument:
    """The argument of an engine that names the model's folder; it leads to a copy if there is one.

    `access` is None if the weights are in the folder.
    """

    def __init__(self, access: WeightsAccess | None, folder: Path, argument: str) -> None:
        self._access = access
        self._folder = folder
        self._argument = argument
        self._model: LinkedModel | None = None

    def resolve(self, arguments: dict[str, Any]) -> None:
        """Let the argument name the folder with the weights; blocks until they are there.

        Nothing changes if the user chose another model or way to load it.
        """
        given = arguments.get(self._argument) == str(self._folder)
        if self._access is None or not given or arguments.get("load_format", "auto") != "auto":
            return
        self._model = LinkedModel(NodeCopy(self._access, self._folder), self._folder)
        arguments[self._argument] = str(self._model.folder())

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
