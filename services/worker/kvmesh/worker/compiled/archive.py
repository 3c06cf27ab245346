"""Archives of compile caches: plain tar files, the same bytes for the same files."""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvmesh.worker.compiled import triton_groups
from kvmesh.worker.compiled.errors import CompileCacheError

FORMAT = 1
MAX_FILES = 100_000
MAX_FILE = 1 << 30
MAX_DEPTH = 16
MAX_NAME = 255  # bytes of one part of a path
# what else engines keep below their roots depends on the node or on what users have sent
TRAVELS = (
    ("vllm", "torch_compile_cache"),
    ("vllm", "modelinfos"),
    ("vllm", "deep_gemm"),
    ("vllm", "flashinfer_autotune_cache"),
    ("inductor",),
    ("triton",),
    ("processes",),
)


def travelling_files(root: Path) -> list[str]:
    """The files below `root` that belong into an archive, as sorted relative paths.

    Links, locks and unfinished files do not. Raises CompileCacheError if there are too many.
    """
    found: list[str] = []
    for parts in TRAVELS:
        for path in _files(root.joinpath(*parts), MAX_DEPTH):
            found.append(path.relative_to(root).as_posix())
            if len(found) > MAX_FILES:
                raise CompileCacheError(f"{root} has more than {MAX_FILES} files")
    return sorted(name for name in found if not _fault(name))


def archive_bound(root: Path) -> int:
    """The largest size of the archive of `root`, in bytes."""
    names = travelling_files(root)
    sizes = (_file_size(root / name) + 2 * tarfile.RECORDSIZE // 5 for name in names)
    return sum(sizes) + 2 * tarfile.RECORDSIZE


def pack(root: Path, target: Path, max_bytes: int) -> None:
    """Write the archive of `root` to the new file `target`.

    Raises CompileCacheError if there is nothing to pack, or more than `max_bytes` of it.
    """
    names = travelling_files(root)
    if not names:
        raise CompileCacheError(f"{root} has no compiled code")
    try:
        with target.open("xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for name in names:
                _add(tar, root, name)
                if file.tell() > max_bytes:
                    raise CompileCacheError(f"{root} holds more than {max_bytes} bytes")
    except OSError as error:
        raise CompileCacheError(f"cannot pack {root}: {error}") from error


def unpack(archive: BinaryIO, target: Path, home: Path, max_bytes: int) -> int:
    """Write the files of an archive below the new folder `target`; returns their number.

    `home` is where the folder will be when an engine reads it. Raises CompileCacheError for
    anything but plain files at relative paths, at most MAX_FILES of them and `max_bytes` in all.
    """
    count, left = 0, max_bytes
    try:
        target.mkdir(0o700)
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                count, left = count + 1, left - member.size
                if fault := _member_fault(member):
                    raise CompileCacheError(f"{member.name[:MAX_NAME]!r} in an archive {fault}")
                if count > MAX_FILES or left < 0:
                    raise CompileCacheError(f"an archive of more than {max_bytes} bytes")
                _extract(tar, member, target, home)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, OSError) as error:
        raise CompileCacheError(f"cannot unpack an archive: {error}") from error
    if not count:
        raise CompileCacheError("an archive without files")
    return count


def _file_size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _files(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith((".", "tmp")) or entry.name.endswith((".lock", ".tmp")):
            continue
        if entry.is_file(follow_symlinks=False):
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False) and depth:
            yield from _files(Path(entry.path), depth - 1)


def _add(tar: tarfile.TarFile, root: Path, name: str) -> None:
    path = root / name
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            content = file.read(MAX_FILE + 1)
    except FileNotFoundError:  # the engine has replaced it since
        return
    if len(content) > MAX_FILE:
        raise CompileCacheError(f"{path} has more than {MAX_FILE} bytes")
    content = triton_groups.without_folder(path, content)
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    tar.addfile(info, io.BytesIO(content))


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, home: Path) -> None:
    source = tar.extractfile(member)
    content = source.read() if source is not None else b""
    if len(content) != member.size:
        raise CompileCacheError(f"{member.name} in an archive is cut off")
    path = target / member.name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(triton_groups.with_folder(home / member.name, content))


def _member_fault(member: tarfile.TarInfo) -> str:
    """The reason why a member is refused; empty if it is not."""
    if member.type != tarfile.REGTYPE or member.sparse is not None:
        return "is not a plain file"
    if not 0 <= member.size <= MAX_FILE:
        return f"has {member.size} bytes"
    return _fault(member.name)


def _fault(name: str) -> str:
    parts = name.split("/")
    if len(parts) > MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
        return "is not a relative path of a file"
    if not name.isprintable() or "\\" in name:
        return "has characters that no cache uses"
    if any(len(part.encode(errors="replace")) > MAX_NAME for part in parts):
        return "has too long a name"
    if not any(tuple(parts[: len(place)]) == place for place in TRAVELS):
        return "is outside of the caches"
    return ""
