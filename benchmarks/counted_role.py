"""A process of a role that counts its tasks and allocations; `request_counts.py` starts it.

    python benchmarks/counted_role.py LIBRARY FILE ROLE

FILE receives two 64-bit counters, of allocations and of tasks.
"""

import asyncio
import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any


def count(library: str, file: Path) -> None:
    """Count from now on; before uvloop is imported, which keeps the class of tasks."""
    file.write_bytes(bytes(16))
    with file.open("r+b") as opened:
        counters = (ctypes.c_uint64 * 2).from_buffer(mmap.mmap(opened.fileno(), 16))
    ctypes.PyDLL(library).count_allocations(counters)

    class CountedTask(asyncio.Task[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            counters[1] += 1
            super().__init__(*arguments, **options)

    asyncio.Task = asyncio.tasks.Task = CountedTask  # type: ignore[misc]


if __name__ == "__main__":
    count(sys.argv[1], Path(sys.argv[2]))
    from kvmesh.cli.main import main

    sys.argv = ["kvmesh", sys.argv[3]]
    sys.exit(main())
