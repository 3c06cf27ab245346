"""A store of weights with copies of model folders, as a weights process leaves them."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmesh.weights.answer import WeightsAccess, WeightsAnswer, write_answer
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from support.weights import CHUNK


class StoredWeights:
    """A store in `folder` with one copy of the model `source`; nothing of it has arrived."""

    def __init__(self, folder: Path, source: Path, chunk_bytes: int = CHUNK) -> None:
        self.source = source
        self.answer_file = folder / "answer.json"
        self.directory = folder / "store"
        self.store = WeightStore(self.directory, 1 << 30)
        self.manifest = checkpoint_manifest(source, chunk_bytes=chunk_bytes)
        self.copy: StoredCopy = self.store.create(self.manifest)
        assert self.copy.fetch()

    @property
    def chunks(self) -> range:
        return range(len(self.manifest.chunks))

    def access(self, keep: bool = False, timeout_s: float = 10.0) -> WeightsAccess:
        return WeightsAccess(self.answer_file, self.directory, 1 << 30, keep, timeout_s)

    def answer(self, disk: str = "") -> None:
        """Answer loaders: the copy, or the folder because of `disk`."""
        found = WeightsAnswer(disk=disk) if disk else WeightsAnswer(digest=self.manifest.digest)
        write_answer(self.answer_file, found)

    def arrive(self, chunks: Iterable[int] | None = None) -> None:
        """Put chunks into the copy; all of them by default."""
        for number in self.chunks if chunks is None else chunks:
            chunk = self.manifest.chunks[number]
            with (self.source / self.manifest.files[chunk.file].name).open("rb") as file:
                file.seek(chunk.offset)
                memory = self.copy.file(chunk.file, writable=True)
                memory[chunk.offset : chunk.offset + chunk.size] = file.read(chunk.size)
            self.copy.mark(number)

    @contextmanager
    def arriving(self, pace_s: float) -> Iterator[threading.Event]:
        """All chunks arrive meanwhile, one each `pace_s` seconds, until the event is set."""
        stop = threading.Event()

        def run() -> None:
            for number in self.chunks:
                if stop.wait(pace_s):
                    return
                self.arrive([number])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield stop
        finally:
            stop.set()
            thread.join()

    def forget(self) -> None:
        """Lose all that has arrived, so that nothing can be loaded from it."""
        self.copy.have[:] = bytes(len(self.chunks))
        for index, file in enumerate(self.manifest.files):
            self.copy.file(index, writable=True)[:] = bytes(file.size)

    def abandon(self) -> None:
        """End as a fetching process that dies."""
        self.copy.end_fetch()
