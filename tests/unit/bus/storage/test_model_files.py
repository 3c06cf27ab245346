"""Archives of model files, which any worker may have written."""

import gzip
import io
import tarfile
from collections.abc import Callable

import pytest
import zstandard

from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.storage import model_files
from kvmesh.bus.storage.model_files import MAX_MEMBERS, unpack
from kvmesh.bus.storage.stored_object import described


def archive(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def packed(content: bytes, stated: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=stated).compress(content)


def of_type(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("config.json")
    member.type, member.linkname = kind, "tokenizer.json"
    return member


def sparse() -> tarfile.TarInfo:
    member = tarfile.TarInfo("config.json")
    member.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "4096"}
    return member


def test_the_files_of_a_model_are_read() -> None:
    names = ("config.json", "of a newer version.json")
    data = archive(*(tarfile.TarInfo(name) for name in names), content=b"{}")
    assert unpack(packed(data)) == {"config.json": b"{}"}


@pytest.mark.parametrize(
    "made",
    [
        lambda: b"no archive",
        lambda: packed(b"no tar" * 200),
        lambda: packed(archive(tarfile.TarInfo("config.json")), stated=False),
        lambda: packed(gzip.compress(archive(tarfile.TarInfo("config.json")))),
        lambda: packed(archive(of_type(tarfile.SYMTYPE))),
        lambda: packed(archive(of_type(tarfile.FIFOTYPE))),
        lambda: packed(archive(sparse(), content=b"x")),
        lambda: packed(archive(*(tarfile.TarInfo(f"{n}") for n in range(MAX_MEMBERS + 1)))),
    ],
)
def test_anything_else_is_an_error(made: Callable[[], bytes]) -> None:
    with pytest.raises(ModelFilesError):
        unpack(made())


def test_the_stated_size_is_checked_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(archive(tarfile.TarInfo("config.json"), content=b"x" * 4096))
    assert unpack(data)
    monkeypatch.setattr(model_files, "MAX_BYTES", 4096)
    with pytest.raises(ModelFilesError, match="more than 4096 bytes"):
        unpack(data)


@pytest.mark.parametrize("nuid", [">", "*", "a.b", "", "a b"])
def test_an_object_whose_parts_are_no_one_subject_is_ignored(nuid: str) -> None:
    text = '{"name":"m","bucket":"b","nuid":"%s","size":1,"chunks":1}'
    assert described((text % nuid).encode(), 1, 0.0) is None
    assert described((text % "Ab9_-").encode(), 1, 0.0) is not None
