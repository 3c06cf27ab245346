"""Loads and saves workloads: traces by file suffix, agent profiles by path or name."""

from pathlib import Path
from typing import Literal

from kvmesh.workload.errors import Repairs, WorkloadError
from kvmesh.workload.formats import mooncake, mooncake_write, native, tracelab
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import builtin, load_profile
from kvmesh.workload.model import Workload

Format = Literal["mooncake", "tracelab", "native"]
SUFFIXES: dict[str, Format] = {".jsonl": "mooncake", ".csv": "tracelab", ".json": "native"}


class FormatError(WorkloadError):
    """A file with an unknown suffix, or no such file or profile."""


def format_of(file: Path) -> Format:
    """The format of a file by its suffix; raises FormatError."""
    try:
        return SUFFIXES[file.suffix]
    except KeyError:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in SUFFIXES.items())
        raise FormatError(f"{file}: unknown suffix; known: {known}") from None


def load(source: str, repair: bool = False, seed: int = 0) -> tuple[Workload, Repairs]:
    """A workload from a trace file, or generated from a profile (`.toml` or a shipped name).

    Raises WorkloadError or OSError.
    """
    file = Path(source)
    if file.suffix == ".toml" or (source in builtin() and not file.exists()):
        generated = AgentGenerator(load_profile(source), seed).workload()
        return generated, Repairs(file, repair)
    if file.suffix not in SUFFIXES and not file.exists():
        raise FormatError(f"{source}: no such file or shipped profile ({', '.join(builtin())})")
    kind = format_of(file)
    if kind == "mooncake":
        return mooncake.read(file, repair)
    if kind == "tracelab":
        return tracelab.read(file, repair)
    return native.read(file), Repairs(file, repair)


def save(workload: Workload, file: Path, block_size: int | None = None) -> list[str]:
    """Write in the format of the suffix of `file`; return the properties that are lost."""
    kind = format_of(file)
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
