"""The copy of a checkpoint that a worker's weights process fetches, as an engine's loader sees it.

All functions block: they belong in a thread or in an engine's own process.
"""

import logging
from pathlib import Path

from kvmesh.weights.answer import WeightsAccess, WeightsAnswer, wait_for_answer
from kvmesh.weights.checkpoint import cache_folder, known_manifest
from kvmesh.weights.errors import StoreError, WeightsError, WeightsLost
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.adapters.weights.arriving_tensors import STALL_S, CopyProgress
from kvmesh.worker.adapters.weights.engine_form import disk_identity
from kvmesh.worker.adapters.weights.mapped_tensors import unknown_dtypes

log = logging.getLogger(__name__)
GROUP = 16  # chunks between two looks at the clock
CONSOLIDATED = "consolidated*.safetensors"  # Mistral's files, which no copy holds


class NodeCopy:
    """Weights of the model in `folder`; the constructor waits for the weights process's answer.

    `copy` is None if they come from the folder; the reason is in the log. `store` is None if the
    node's memory cannot be used at all.
    """

    def __init__(self, access: WeightsAccess, folder: Path) -> None:
        self._folder = folder
        self.keep = access.keep
        self.store: WeightStore | None = None
        self.copy: StoredCopy | None = None
        answer = _answer(access)
        try:
            self.store = WeightStore(access.directory, access.max_bytes)
            self.copy = self._open(self.store, answer)
        except WeightsError as error:
            self._report(error)

    def identities(self) -> list[str]:
        """Names of the content that is to be loaded, the best first; empty if it cannot be told.

        The digest of its manifest is one; another is the state of the folder's files, if these
        hold that content or it comes from them.
        """
        digest = self.copy.manifest.digest if self.copy is not None else ""
        if any(self._folder.glob(CONSOLIDATED)):
            return []
        try:
            files = disk_identity(self._folder)
        except (WeightsError, OSError):
            files = ""
        known = known_manifest(self._folder, cache_folder(), "", "") if files else None
        if not digest:
            return [name for name in (known.digest if known else "", files) if name]
        return [digest, files] if known is not None and known.digest == digest else [digest]

    def wait_until_complete(self, stall_s: float = STALL_S) -> StoredCopy | None:
        """The copy once all of it is there; None, and a line in the log, if it does not come."""
        copy = self.copy
        if copy is None:
            return None
        total, progress = len(copy.manifest.chunks), CopyProgress(copy)
        try:
            for first in range(0, total, GROUP):
                copy.wait(range(first, min(first + GROUP, total)), stall_s)
                progress.tell()
        except WeightsLost as error:
            self._report(error)
            self.close()
            return None
        return copy

    def close(self) -> None:
        """End the use of the copy."""
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.close()

    def _open(self, store: WeightStore, answer: WeightsAnswer) -> StoredCopy | None:
        if answer.disk:
            raise WeightsLost(answer.disk)
        if any(self._folder.glob(CONSOLIDATED)):
            raise WeightsLost("it has Mistral's own files")
        copy = store.open(answer.digest)
        if copy is None:
            raise WeightsLost("the copy has been removed")
        if unknown := unknown_dtypes(copy.manifest):
            copy.close()
            raise StoreError(f"the copy has tensors of the types {', '.join(unknown)}")
        return copy

    def _report(self, error: WeightsError) -> None:
        log.info("the weights come from %s: %s", self._folder, error)


def _answer(access: WeightsAccess) -> WeightsAnswer:
    if not access.timeout_s:
        return WeightsAnswer(disk="no weights process runs")
    try:
        return wait_for_answer(access.answer_file, access.timeout_s)
    except WeightsLost as error:
        return WeightsAnswer(disk=str(error))
