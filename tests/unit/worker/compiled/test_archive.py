"""Archives of compile caches: the same bytes for the same files, and nothing but plain files."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from kvmesh.worker.compiled.archive import archive_bound, pack, travelling_files, unpack
from kvmesh.worker.compiled.errors import CompileCacheError

KERNEL = "vllm/torch_compile_cache/aot/abc/inductor_cache/7c/kernel.so"
GROUP = "triton/XYZ/__grp__add.json"
LARGE = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    write(root / KERNEL, b"code")
    write(root / "vllm/modelinfos/llama.json", b"{}")
    write(root / "triton/XYZ/add.cubin", b"cubin")
    group = {"child_paths": {"add.cubin": str(root / "triton/XYZ/add.cubin")}}
    write(root / GROUP, json.dumps(group).encode())
    return root


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_files_come_back(root: Path, tmp_path: Path) -> None:
    pack(root, tmp_path / "a.tar", LARGE)
    target, home = tmp_path / "new", tmp_path / "elsewhere"
    with (tmp_path / "a.tar").open("rb") as archive:
        assert unpack(archive, target, home, LARGE) == 4
    assert travelling_files(target) == travelling_files(root)
    assert (target / KERNEL).read_bytes() == b"code"
    group = json.loads((target / GROUP).read_bytes())
    assert group == {"child_paths": {"add.cubin": str(home / "triton/XYZ/add.cubin")}}
    assert (target / KERNEL).stat().st_mode & 0o777 == 0o600


def test_equal_files_make_equal_archives(root: Path, tmp_path: Path) -> None:
    pack(root, tmp_path / "a.tar", LARGE)
    root.rename(tmp_path / "moved")
    os.utime(tmp_path / "moved" / KERNEL, (1, 1))
    (tmp_path / "moved" / KERNEL).chmod(0o755)
    pack(tmp_path / "moved", tmp_path / "b.tar", LARGE)
    content = (tmp_path / "a.tar").read_bytes()
    assert content == (tmp_path / "b.tar").read_bytes()
    assert len(content) <= archive_bound(tmp_path / "moved")


def test_what_depends_on_the_node_stays(root: Path, tmp_path: Path) -> None:
    before = travelling_files(root)
    write(root / "vllm/gpu_p2p_access_cache_for_0.json", b"{}")
    write(root / "vllm/assets/picture.png", b"a user's")
    write(root / "vllm/torch_compile_cache/aot/locks/kernel.lock", b"")
    write(root / "vllm/torch_compile_cache/aot/.123.tmp", b"unfinished")
    write(root / "triton/tmp.pid_1_2/add.cubin", b"unfinished")
    (root / "vllm/modelinfos/link").symlink_to("/etc/passwd")
    (root / "triton/folder").symlink_to(tmp_path)
    assert travelling_files(root) == before


def test_an_empty_or_large_root_is_not_packed(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileCacheError, match="no compiled code"):
        pack(tmp_path / "absent", tmp_path / "a.tar", LARGE)
    with pytest.raises(CompileCacheError, match="more than 100 bytes"):
        pack(root, tmp_path / "b.tar", 100)


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (member("/etc/cron.d/job"), "not a relative path"),
        (member("triton/../../job"), "not a relative path"),
        (member("triton//job"), "not a relative path"),
        (member("triton/./job"), "not a relative path"),
        (member("job"), "outside of the caches"),
        (member("vllm/assets/job"), "outside of the caches"),
        (member("tritonx/job"), "outside of the caches"),
        (member("triton/a\nb"), "no cache uses"),
        (member("triton/" + "a/" * 20 + "b"), "not a relative path"),
        (member("triton/" + "a" * 300), "too long"),
        (member("triton/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "not a plain file"),
        (member("triton/link", type=tarfile.LNKTYPE, linkname="triton/a"), "not a plain file"),
        (member("triton/device", type=tarfile.CHRTYPE), "not a plain file"),
        (member("triton/pipe", type=tarfile.FIFOTYPE), "not a plain file"),
        (member("triton/folder", type=tarfile.DIRTYPE), "not a plain file"),
        (member("triton/sparse", type=tarfile.GNUTYPE_SPARSE), "not a plain file"),
    ],
)
def test_other_members_are_refused(info: tarfile.TarInfo, reason: str, tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member("triton/a"))
        tar.addfile(info)
    archive.seek(0)
    with pytest.raises(CompileCacheError, match=reason):
        unpack(archive, tmp_path / "new", tmp_path / "new", LARGE)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a"]


def test_a_file_twice_is_refused(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(member("triton/a"))
        tar.addfile(member("triton/a"))
    archive.seek(0)
    with pytest.raises(CompileCacheError, match="File exists"):
        unpack(archive, tmp_path / "new", tmp_path / "new", LARGE)


def test_damaged_archives_are_refused(root: Path, tmp_path: Path) -> None:
    pack(root, tmp_path / "a.tar", LARGE)
    whole = (tmp_path / "a.tar").read_bytes()
    for number, content in enumerate([b"", b"x" * 5000, whole[:700], b"\0" * 1024]):
        with pytest.raises(CompileCacheError):
            unpack(io.BytesIO(content), tmp_path / f"new{number}", tmp_path, LARGE)


def test_more_bytes_than_allowed_are_refused(root: Path, tmp_path: Path) -> None:
    pack(root, tmp_path / "a.tar", LARGE)
    with (
        (tmp_path / "a.tar").open("rb") as archive,
        pytest.raises(CompileCacheError, match="more than 5 bytes"),
    ):
        unpack(archive, tmp_path / "new", tmp_path, 5)
