"""Loads and saves workloads: traces by their content, agent profiles by path or name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from msgspec import structs

from kvmesh.runtime.quantities import counted
from kvmesh.workload.collection import uncollected
from kvmesh.workload.errors import SHOWN, Repairs, WorkloadError
from kvmesh.workload.formats import native, tracelab
from kvmesh.workload.formats.detection import TEXT, FormatError, TraceFormat, format_of
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import builtin, load_profile
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.assembly import ReadTrace
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.source import TraceFile, trace_files
from kvmesh.workload.reading.window import adjusted, planned_starts
from kvmesh.workload.writing import mooncake
from kvmesh.workload.writing.losses import Property, lost
from kvmesh.workload.writing.targets import Target, write_for

WrittenFormat: TypeAlias = Literal["mooncake", "tracelab", "native"]
DEFAULTS = ReadOptions()
SUFFIXES: dict[str, WrittenFormat] = {".jsonl": "mooncake", ".csv": "tracelab", ".json": "native"}

MOONCAKE_HOLDS: tuple[Property, ...] = ("priorities", "classes", "aborts", "parents")
OWN_ROWS = "rows with wait_for are kvmesh's own spelling; --for writes rows of other tools"


class Saved(NamedTuple):
    """A written file: the properties that were lost, and how its reader takes it."""

    losses: list[str]
    usage: str = ""


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
    options = structs.replace(options, used=set())
    if len(sources) == 1 and _is_profile(sources[0]):
        repairs = Repairs(Path(sources[0]), repair)
        drawn = AgentGenerator(load_profile(sources[0]), seed).workload()
        return _adjusted(
            ReadTrace(workload=drawn, starts=planned_starts(drawn)), options, repairs
        ), repairs
    for each in sources:
        if not each or not Path(each).exists():
            raise FormatError(f"{each or repr(each)}: {_no_such(each)}")
    files, left_out = trace_files(sources)
    folders = any(Path(each).is_dir() for each in sources)
    with _bounded_depth(files):
        files, found, others = _of_one_format(files, folders)
    left_out += others
    repairs = Repairs(files[0].path, repair)
    if left_out:
        more = " …" if len(left_out) > SHOWN else ""
        kind = "that is no trace" if len(left_out) == 1 else "that are no traces"
        names = ", ".join(left_out[:SHOWN])
        repairs.assume(f"left out {counted(len(left_out), 'file')} {kind}: {names}{more}")
    with uncollected(), _bounded_depth(files):
        read = found.read(files, options, repairs)
    workload = _adjusted(read, options, repairs)
    repairs.summary = _summary(files, found, workload, read.starts)
    return workload, repairs


def _no_such(source: str) -> str:
    if "://" in source:
        return "a URL: fetch the file and name it"
    if source == "-":
        return "traces are read twice: write the input to a file and name it"
    return f"no such file or shipped profile ({', '.join(builtin())})"


def _adjusted(read: ReadTrace, options: ReadOptions, repairs: Repairs) -> Workload:
    """The workload as the options want it; states those without effect."""
    for reason in options.unused():
        repairs.assume(reason)
    return adjusted(read.workload, read.starts, options, repairs)


@contextmanager
def _bounded_depth(files: Sequence[TraceFile]) -> Iterator[None]:
    """Raise FormatError for JSON that is nested too deeply to decode."""
    try:
        yield
    except RecursionError as error:
        more = " or a file after it" if len(files) > 1 else ""
        raise FormatError(f"{files[0]}{more}: JSON is nested too deeply") from error


def _is_profile(source: str) -> bool:
    return Path(source).suffix == ".toml" or (source in builtin() and not Path(source).exists())


def _of_one_format(
    files: Sequence[TraceFile], folders: bool
) -> tuple[list[TraceFile], TraceFormat, list[str]]:
    """The files that have a format, which must be one, and the names of those left out.

    Those of folders may be of none, or hold texts beside traces. Raises FormatError, TraceError or
    OSError.
    """
    found: list[tuple[TraceFile, TraceFormat]] = []
    left_out: list[tuple[TraceFile, WorkloadError]] = []
    for file in files:
        try:
            found.append((file, format_of(file)))
        except WorkloadError as error:
            if not folders:
                raise
            left_out.append((file, error))
    if not found:
        raise left_out[0][1]
    if folders and any(each is not TEXT for _, each in found):
        beside = FormatError("texts beside traces")
        left_out += [(file, beside) for file, each in found if each is TEXT]
        found = [(file, each) for file, each in found if each is not TEXT]
    first, format_ = found[0]
    for file, other in found:
        if other is not format_:
            raise FormatError(
                f"{file} is {other.name}, but {first} is {format_.name}: "
                "the files of one workload have one format; name those alone (FOLDER/*.json)"
            )
    return [file for file, _ in found], format_, [file.path.name for file, _ in left_out]


def _summary(
    files: Sequence[TraceFile], found: TraceFormat, workload: Workload, starts: Sequence[float]
) -> str:
    several = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    hours = (max(starts) - min(starts)) / 3600
    return (
        f"{files[0].path.name}{several}: {found.name}, {counted(len(workload), 'request')} in "
        f"{counted(len(workload.sessions), 'session')}, {hours:,.2f} h"
    )


def save(
    workload: Workload, file: Path, block_size: int | None = None, target: Target | None = None
) -> Saved:
    """Write in the format of the suffix of `file`, or the one that `target` reads (`.jsonl`)."""
    kind = _written_format(file)
    if target is not None:
        if kind != "mooncake":
            raise FormatError(f"{file}: {target} reads JSON lines; name the file .jsonl")
        return Saved(*write_for(target, workload, file, block_size))
    if kind == "native":
        native.write(workload, file)
        return Saved([])
    if kind == "mooncake":
        mooncake.write(workload, file, block_size)
        losses = list(lost(workload, MOONCAKE_HOLDS))
        return Saved(losses, OWN_ROWS if mooncake.is_agentic(workload) else "")
    return Saved([*tracelab.write(workload, file), *lost(workload, MOONCAKE_HOLDS)])


def _written_format(file: Path) -> WrittenFormat:
    """The format that a suffix stands for; raises FormatError."""
    try:
        return SUFFIXES[file.suffix]
    except KeyError:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in SUFFIXES.items())
        raise FormatError(f"{file}: unknown suffix; known: {known}") from None
