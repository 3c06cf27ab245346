"""The command line and environment that other processes see of this one (Linux).

A fork has those of its parent. The kernel reads them from this process's memory, from where the
process says that they are; `execve` does so for a new program.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PR_SET_NAME = 15
PR_SET_MM = 35
PR_SET_MM_MAP = 14
UNCHANGED = 2**32 - 1
# fields of /proc/PID/stat, counted after the name of the program, that the kernel wants back
START_CODE, END_CODE, START_STACK = 23, 24, 25
START_DATA, END_DATA, START_BRK = 42, 43, 44
_shown: list[mmap.mmap] = []  # what the kernel reads


class CommandLineError(Exception):
    """The kernel refuses."""


class _Map(ctypes.Structure):
    """`prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show_command_line(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Show these as command line and environment of this process; raises CommandLineError."""
    arguments = _joined(argv)
    both = arguments + _joined(f"{name}={value}" for name, value in env.items())
    memory = mmap.mmap(-1, len(both), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(both)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    wanted = _Map(
        start_code=int(fields[START_CODE]),
        end_code=int(fields[END_CODE]),
        start_data=int(fields[START_DATA]),
        end_data=int(fields[END_DATA]),
        start_brk=int(fields[START_BRK]),
        start_stack=int(fields[START_STACK]),
        arg_start=start,
        arg_end=start + len(arguments),
        env_start=start + len(arguments),
        env_end=start + len(both),
        exe_fd=UNCHANGED,
    )
    size = ctypes.c_ulong(ctypes.sizeof(wanted))
    wanted.brk = libc.sbrk(0)  # last: an allocation may change it
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(wanted), size, 0):
        raise CommandLineError(os.strerror(ctypes.get_errno()))
    libc.prctl(PR_SET_NAME, os.fsencode(Path(argv[0]).name), 0, 0, 0)
    _shown[:] = [memory]


def _joined(texts: Iterable[str]) -> bytes:
    return b"".join(itertools.chain.from_iterable((os.fsencode(text), b"\0") for text in texts))
