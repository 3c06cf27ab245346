"""vLLM's offloading on a CPU: all of it but the copies, which vLLM has for GPUs only."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PLUGIN = "host_copies"
TESTS = Path(__file__).parents[1]


def register() -> None:
    """Let vLLM's host tier copy between two places in the memory of the host."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    class HostCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM has no types here
        def __init__(self, caches: Any, chunks: int) -> None:
            self._groups = caches.group_data_refs
            self._device = [found.tensor for found in caches.tensors]
            self._host = [rows[:1].repeat(chunks, 1).zero_() for rows in self._device]
            self._done: list[Any] = []

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, src_spec, self._device, src_spec, self._host, dst_spec)

        def submit_load(
            self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
        ) -> bool:
            return self._copy(job_id, dst_spec, self._host, src_spec, self._device, dst_spec)

        def _copy(
            self, job_id: int, device: Any, source: Any, src: Any, target: Any, dst: Any
        ) -> bool:
            start = 0
            for group, size in zip(self._groups, device.group_sizes, strict=True):
                rows = slice(start, start + size)
                for tensor in {ref.tensor_idx for ref in group}:
                    taken = source[tensor][src.block_ids[rows].tolist()]
                    target[tensor][dst.block_ids[rows].tolist()] = taken
                start += size
            self._done.append(TransferResult(job_id, True))
            return True

        def get_finished(self) -> list[Any]:
            done, self._done = self._done, []
            return done

        def wait(self, job_ids: set[int]) -> None:
            pass

    def get_worker(spec: Any, kv_caches: Any) -> Any:
        return HostCopies(kv_caches, spec.num_chunks)

    CPUOffloadingSpec.get_worker = get_worker


@contextmanager
def host_copies(folder: Path) -> Iterator[None]:
    """Load `register` as a plugin of vLLM's in each of its processes; it is found in `folder`."""
    info = folder / f"{PLUGIN}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = support.vllm_offload:register\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        given = os.environ.get("PYTHONPATH", "")
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(folder), str(TESTS), given]).strip(os.pathsep)
        )
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield
