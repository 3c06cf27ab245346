"""Loads and saves workloads: traces by their content, agent profiles by path or name."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs
from kvmesh.workload.formats import mooncake_write, native, tracelab
from kvmesh.workload.formats.detection import FormatError, TraceFormat, format_of
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import builtin, load_profile
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.source import TraceFile, trace_files
from kvmesh.workload.reading.window import adjusted

WrittenFormat: TypeAlias = Literal["mooncake", "tracelab", "native"]
DEFAULTS = ReadOptions()
SUFFIXES: dict[str, WrittenFormat] = {".jsonl": "mooncake", ".csv": "tracelab", ".json": "native"}


def load(
    source: str | Sequence[str],
    repair: bool = False,
    seed: int = 0,
    options: ReadOptions = DEFAULTS,
) -> tuple[Workload, Repairs]:
    """One workload from files and folders of one format, or from a profile.

    A profile is a `.toml` file or a shipped name. Raises WorkloadError or OSError.
    """
    sources = [source] if isinstance(source, str) else list(source)
    if len(sources) == 1 and _is_profile(sources[0]):
        repairs = Repairs(Path(sources[0]), repair)
        return AgentGenerator(load_profile(sources[0]), seed).workload(), repairs
    for each in sources:
        if not Path(each).exists():
            shipped = ", ".join(builtin())
            raise FormatError(f"{each}: no such file or shipped profile ({shipped})")
    files = trace_files(sources)
    found = _one_format(files)
    repairs = Repairs(files[0].path, repair)
    with _without_collection():
        read = found.read(files, options, repairs)
    workload = adjusted(read.workload, read.starts, options, repairs)
    repairs.summary = _summary(files, found, workload, read.starts)
    return workload, repairs


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the search for garbage, a third of the time: readers make many objects, no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_profile(source: str) -> bool:
    return Path(source).suffix == ".toml" or (source in builtin() and not Path(source).exists())


def _one_format(files: Sequence[TraceFile]) -> TraceFormat:
    found = format_of(files[0])
    for file in files[1:]:
        if (other := format_of(file)) is not found:
            raise FormatError(
                f"{file} is {other.name}, but {files[0]} is {found.name}: "
                "the files of one workload have one format"
            )
    return found


def _summary(
    files: Sequence[TraceFile], found: TraceFormat, workload: Workload, starts: Sequence[float]
) -> str:
    several = f" and {len(files) - 1:,} more files" if len(files) > 1 else ""
    hours = (max(starts) - min(starts)) / 3600
    return (
        f"{files[0].path.name}{several}: {found.name}, {counted(len(workload), 'request')} in "
        f"{counted(len(workload.sessions), 'session')}, {hours:,.2f} h"
    )


def save(workload: Workload, file: Path, block_size: int | None = None) -> list[str]:
    """Write in the format of the suffix of `file`; return the properties that are lost."""
    kind = _written_format(file)
    if kind == "native":
        native.write(workload, file)
        return []
    losses: list[str] = []
    if kind == "mooncake":
        mooncake_write.write(workload, file, block_size)
    else:
        losses += tracelab.write(workload, file)
    if any(round_.thinking_tokens for round_ in workload.rounds):
        losses.append("thinking tokens")
    if any(session.kind for session in workload.sessions):
        losses.append("session kinds")
    if any(session.ends for session in workload.sessions):
        losses.append("session ends")
    if any(round_.marks for round_ in workload.rounds):
        losses.append("cache marks")
    if any(round_.osl for round_ in workload.rounds):
        losses.append("expected output lengths")
    if any(round_.wait_class or round_.approval_s for round_ in workload.rounds):
        losses.append("classes of tool calls and approvals")
    return losses


def _written_format(file: Path) -> WrittenFormat:
    """The format that a suffix stands for; raises FormatError."""
    try:
        return SUFFIXES[file.suffix]
    except KeyError:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in SUFFIXES.items())
        raise FormatError(f"{file}: unknown suffix; known: {known}") from None
