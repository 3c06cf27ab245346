"""Files of a trace: folders, gzip, byte order marks, lines, records and tables."""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from kvmesh.workload.errors import Problem, TraceError, WorkloadError
from kvmesh.workload.reading.text_records import is_text

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".traj")
# Of files that hold traces which are not read, so that a folder's are named.
OTHERS = (".parquet", ".arrow", ".feather", ".avro", ".orc", ".zst", ".xz", ".bz2", ".zip", ".tar")
PEEKED_LINES = 50
NOTES = (".md", ".rst")  # about the files of a folder
MOST_PACKINGS = 3  # gzip within gzip
DELIMITERS = ",;\t|"
USUAL_CELL, LONG_CELL = csv.field_size_limit(), (1 << 31) - 1  # characters
_GZIP = b"\x1f\x8b"
_MARK = b"\xef\xbb\xbf"
DAMAGED = "fetch it again, or unpack what is left (`zcat FILE > part.jsonl`)"
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)

Record = tuple[int, bytes]


class SourceError(WorkloadError):
    """A source that does not exist or holds no traces."""


class TraceFile:
    """One file, plain or gzip."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inside = ""

    def __str__(self) -> str:
        return str(self.path)

    def lines(self) -> Iterator[Record]:
        """(number from 1, bytes) of each line that is not blank; raises TraceError or OSError."""
        return ((number, line) for number, line in self.all_lines() if line.strip())

    def all_lines(self) -> Iterator[Record]:
        """(number from 1, bytes) of each line; raises TraceError or OSError."""
        number = 0
        try:
            with self._open() as stream:
                for number, line in enumerate(stream, 1):
                    yield number, line.removeprefix(_MARK) if number == 1 else line
        except _DAMAGED as error:
            raise self.error(number + 1, f"damaged gzip file: {error}", DAMAGED) from error

    def read(self) -> bytes:
        """The whole content; raises TraceError or OSError."""
        try:
            with self._open() as stream:
                return stream.read().removeprefix(_MARK)
        except _DAMAGED as error:
            raise self.error(1, f"damaged gzip file: {error}", DAMAGED) from error

    @cached_property
    def head(self) -> list[bytes]:
        """The first lines that are not blank."""
        return [line for _, line in islice(self.lines(), PEEKED_LINES)]

    @cached_property
    def is_json(self) -> bool:
        """True if the content begins like a JSON object or array."""
        return bool(self.head) and self.head[0].lstrip()[:1] in (b"{", b"[")

    def records(self) -> Iterator[Record]:
        """(line or item, JSON) of each record of JSON lines, an array, or a single document.

        Those in `inside`, a list of the document, if a reader has named it.
        """
        if self.inside:
            document = msgspec.json.decode(self.read(), type=dict[str, msgspec.Raw])
            items = msgspec.json.decode(document[self.inside], type=list[msgspec.Raw])
            yield from ((index, bytes(item)) for index, item in enumerate(items, 1))
        elif self._has_rows:
            yield from self.lines()
        elif self.head[0].lstrip().startswith(b"["):
            try:
                items = msgspec.json.decode(self.read(), type=list[msgspec.Raw])
            except msgspec.MsgspecError as error:
                raise self.error(1, str(error)) from error
            yield from ((index, bytes(item)) for index, item in enumerate(items, 1))
        else:
            yield 1, self.read()

    @cached_property
    def _has_rows(self) -> bool:
        """True for JSON lines: an object per line, or at least not one object in all lines."""
        if not self.head or self.head[0].lstrip().startswith(b"["):
            return not self.head
        if any(_is_object(line) for line in self.head):
            return True
        return len(self.head) < PEEKED_LINES and not _is_object(self.read())

    def table(self) -> "Table":
        """The rows of a CSV file below its header; raises TraceError or OSError."""
        return Table(self)

    def error(self, line: int, reason: str, hint: str = "") -> TraceError:
        return TraceError(self.path, [Problem(line, reason, "", self.path, hint)])

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """The content, unpacked as often as it is packed."""
        with ExitStack() as opened:
            stream = opened.enter_context(self.path.open("rb"))
            for _ in range(MOST_PACKINGS):
                if stream.peek(2)[:2] != _GZIP:
                    break
                unpacked: Any = opened.enter_context(gzip.GzipFile(fileobj=stream, mode="rb"))
                stream = io.BufferedReader(unpacked)
            yield stream


EXCESS = "\0"


class Table:
    """Rows of a CSV file as dictionaries, with the problems of lines that have other columns.

    Names of columns are in lower case.
    """

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._is_whole = True  # the last line that was read ends with a line break
        header = file.head[0] if file.head else b""
        delimiter = max(DELIMITERS, key=lambda each: header.count(each.encode()))
        csv.field_size_limit(USUAL_CELL)
        self._reader = csv.DictReader(
            self._text(),
            restkey=EXCESS,
            delimiter=delimiter,
            strict=True,  # else a quote without its end takes all that follows
            skipinitialspace=any(f'{delimiter} "'.encode() in line for line in file.head[:2]),
        )
        try:
            while header and not self._reader.fieldnames:  # blank lines
                self._reader.fieldnames = None
            self.columns = [name.strip().lower() for name in self._reader.fieldnames or ()]
        except csv.Error as error:
            raise file.error(1, str(error)) from error
        self._reader.fieldnames = self.columns
        texts = is_text(dict.fromkeys(self.columns, "text"))
        self._limit = LONG_CELL if texts or "hash_ids" in self.columns else USUAL_CELL

    def _text(self) -> Iterator[str]:
        for _, line in self._file.all_lines():
            self._is_whole = line.endswith(b"\n")
            yield line.decode("utf-8", "replace")

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """(line, fields by column, or the reason why there are none); raises TraceError."""
        twice = [name for name in set(self.columns) if name and self.columns.count(name) > 1]
        if twice:
            raise self._file.error(1, f"several columns with the name {min(twice)}")
        while True:
            csv.field_size_limit(self._limit)
            try:
                fields = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield self._reader.reader.line_num, str(error)
                continue
            if EXCESS in fields:
                yield self._reader.line_num, "more fields than columns"
            elif not self._is_whole and None in fields.values():
                yield self._reader.line_num, "a line that is cut off"
            else:
                yield self._reader.line_num, fields


def _is_object(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return False
    return True


class Found(NamedTuple):
    """The files of the sources, and those of folders that are left out, with the reason."""

    files: list[TraceFile]
    left_out: list[str]


def trace_files(sources: Iterable[str]) -> Found:
    """The files that the sources name; of a folder, those below it with a suffix of traces.

    Raises SourceError or OSError.
    """
    found: dict[Path, Path] = {}
    left_out: list[str] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            inside = _inside(path, left_out)
            if not inside:
                known = ", ".join(SUFFIXES)
                others = f"; it has {', '.join(left_out[:3])}" if left_out else ""
                raise SourceError(
                    f"{source}: no trace in this folder ({known}, or those with .gz){others}"
                )
        elif path.is_file():
            inside = {path.resolve(): path}
        else:
            raise SourceError(f"{source}: a pipe or device, which is read once: name a file")
        for target, file in inside.items():
            if found.setdefault(target, file) is not file:
                raise SourceError(f"{file}: this file is named twice")
    return Found([TraceFile(path) for path in found.values()], left_out)


def _inside(folder: Path, left_out: list[str]) -> dict[Path, Path]:
    """The traces below a folder by what links lead to; hidden files and notes are none."""
    found: dict[Path, Path] = {}
    for file in sorted(_walk(folder)):
        if not file.name.lower().removesuffix(".gz").endswith((*SUFFIXES, *OTHERS)):
            left_out.append(f"{file.name} (not a name of traces)")
        elif not file.exists():
            left_out.append(f"{file.name} (a dead link)")
        elif not file.is_file():
            left_out.append(f"{file.name} (a pipe or device)")
        elif (first := found.setdefault(file.resolve(), file)) is not file:
            left_out.append(f"{file.name} (a link to {first.name})")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder and those that it links to, but hidden ones and notes."""
    passed: set[Path] = set()
    for name, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        here = Path(name)
        if here.resolve() in passed:
            folders.clear()
            continue
        passed.add(here.resolve())
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for file in files:
            if not file.startswith(".") and not file.lower().endswith(NOTES):
                yield here / file


def _fail(error: OSError) -> None:
    raise error
