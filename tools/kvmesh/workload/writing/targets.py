"""Files for other tools: the rows that each reads, and the options that it needs for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from kvmesh.workload.model import Workload
from kvmesh.workload.writing import agentic
from kvmesh.workload.writing.losses import Property, lost
from kvmesh.workload.writing.mooncake import is_agentic
from kvmesh.workload.writing.requests import write_increments, write_timed

Target: TypeAlias = Literal["aiperf", "dynamo", "guidellm", "vllm"]
# Tokens per block id that a tool assumes.
BLOCK_SIZES: dict[Target, int] = {"aiperf": 512, "dynamo": 512, "guidellm": 512, "vllm": 16}


def write_for(
    target: Target, workload: Workload, file: Path, block_size: int | None
) -> tuple[list[str], str]:
    """Write rows for `target`; return the properties that it ignores, and how to read the file.

    Without `block_size`, blocks are those of the workload, or of the target for an exact one.
    """
    own = workload.block_size if workload.block_size > 1 else BLOCK_SIZES[target]
    size = block_size or own
    other = size if size != BLOCK_SIZES[target] else None
    held: Sequence[Property] = ()
    if target == "aiperf":
        losses = write_increments(workload, file, size)
        usage = _joined(
            "aiperf profile --custom-dataset-type mooncake_trace --fixed-schedule",
            other and f"--isl-block-size {other}",
        )
    elif target == "dynamo" and is_agentic(workload):
        losses, held = agentic.write(workload, file, size), ("priorities", "classes", "parents")
        usage = "trace format agentic_mooncake"
    elif target == "dynamo":
        losses = write_timed(workload, file, size, per_second=1e3)
        usage = _joined("trace format mooncake", other and f"trace block size {other}")
    elif target == "guidellm":
        losses = write_timed(workload, file, size)
        usage = _joined(
            "guidellm run --profile kind=replay, data of kind mooncake",
            other and f"hash_id_block_size={other}",
        )
    else:
        losses = write_timed(workload, file, size)
        usage = _joined(
            "vllm bench serve --backend openai --dataset-name timed_trace",
            f"--num-prompts {len(workload)}",  # else 1000
            other and f"--timed-trace-chunk-hash-size {other}",
        )
    return [*losses, *lost(workload, held)], usage


def _joined(*parts: str | int | None) -> str:
    return " ".join(str(part) for part in parts if part)
