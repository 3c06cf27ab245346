"""The file of a backup."""

import zipfile
from pathlib import Path

import pytest

from kvmesh.cli.backups.archive import (
    ArchiveError,
    BackupManifest,
    StoredValue,
    read_manifest,
    read_values,
    write_archive,
)

VALUES = [
    StoredValue("keys", "team=20a", b'{"name":"team a"}'),
    StoredValue("secrets", "tenants", bytes(range(32))),
    StoredValue("pins", "empty", b""),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mesh.zip"
    manifest = BackupManifest(
        namespace="kvmesh", version="0.1.0", time=1.0, by="me@here", streams={}, values=[]
    )
    write_archive(file, manifest, VALUES)
    return file


def rewritten(file: Path, name: str, data: bytes | None) -> None:
    """Replace a member, or leave it out."""
    with zipfile.ZipFile(file) as archive:
        members = {each: archive.read(each) for each in archive.namelist()}
    if data is None:
        del members[name]
    else:
        members[name] = data
    with zipfile.ZipFile(file, "w") as archive:
        for each, content in members.items():
            archive.writestr(each, content)


def check(file: Path) -> list[StoredValue]:
    return list(read_values(file, read_manifest(file)))


def test_values_return_as_they_were(file: Path) -> None:
    assert check(file) == VALUES
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == ["mesh.zip"]


@pytest.mark.parametrize("data", [b"x" * 32, b"short", None])
def test_a_damaged_value_is_found(file: Path, data: bytes | None) -> None:
    rewritten(file, "secrets/tenants", data)
    with pytest.raises(ArchiveError, match="damaged"):
        check(file)


def test_every_cut_and_every_flipped_byte_is_an_error_or_harmless(file: Path) -> None:
    whole = file.read_bytes()
    for end in range(0, len(whole), 7):
        file.write_bytes(whole[:end])
        with pytest.raises(ArchiveError):
            check(file)
    for place in range(0, len(whole), 5):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            found = check(file)
        except ArchiveError:
            continue
        assert found == VALUES


def test_other_files_are_no_backups(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="cannot read"):
        read_manifest(tmp_path / "none.zip")
    (tmp_path / "text").write_text("keys")
    with pytest.raises(ArchiveError, match="no backup of a mesh"):
        read_manifest(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("manifest.json", '{"a": 1}')
    with pytest.raises(ArchiveError, match="no backup of a mesh"):
        read_manifest(tmp_path / "other.zip")


def test_a_newer_format_is_refused(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        text = archive.read("manifest.json")
    rewritten(file, "manifest.json", text.replace(b'"format":1', b'"format":2'))
    with pytest.raises(ArchiveError, match="newer kvmesh"):
        read_manifest(file)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    manifest = BackupManifest(namespace="m", version="1", time=0.0, by="", streams={}, values=[])
    with pytest.raises(ArchiveError, match="cannot write"):
        write_archive(tmp_path / "missing" / "file", manifest, [])
