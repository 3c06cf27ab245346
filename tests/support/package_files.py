"""Files of published packages, by pinned version and hash, kept in an ignored folder."""

import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".packages"
PYPI = "https://pypi.org/simple"
TIMEOUT_S = 120


class Package(NamedTuple):
    """A file of a project on the index that pip uses."""

    project: str
    file: str
    sha256: str


def package_files(package: Package, ending: str) -> list[Path]:
    """The package's files whose names end so; raises OSError if the index cannot be reached."""
    folder = KEPT / f"{package.file}{ending}"
    if not folder.exists():
        begun = folder.with_name(f"{os.getpid()}-{folder.name}")
        for name, data in _members(_archive(package), ending):
            target = begun / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        try:
            begun.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(begun)
    return sorted(folder.rglob(f"*{ending}"))


def _archive(package: Package) -> Path:
    """The package, downloaded."""
    KEPT.mkdir(exist_ok=True)
    url = _url(package)
    target = KEPT / f"{os.getpid()}-{package.file}"
    digest = hashlib.sha256()
    with _open(url) as source, target.open("wb") as kept:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            kept.write(chunk)
    if digest.hexdigest() != package.sha256:
        target.unlink()
        raise OSError(f"{package.file} has another hash")
    return target


def _url(package: Package) -> str:
    index = _configured("index-url") or PYPI
    page = f"{index.rstrip('/')}/{package.project}/"
    kind = "application/vnd.pypi.simple.v1+json"
    with _open(urllib.request.Request(page, headers={"Accept": kind})) as answer:
        files = json.load(answer)["files"]
    for each in files:
        if each["filename"] == package.file:
            return str(urljoin(page, each["url"]))
    raise OSError(f"{index} lacks {package.file}")


def _configured(name: str) -> str:
    """A setting of pip, "" if there is none."""
    pip = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    found = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get(f"PIP_{name.upper().replace('-', '_')}") or found


def _open(request: str | urllib.request.Request) -> Any:
    # the tests' SSL_CERT_FILE has no certificates
    paths = ssl.get_default_verify_paths()
    context = ssl.create_default_context(cafile=_configured("cert") or None)
    context.load_verify_locations(capath=paths.openssl_capath)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)


def _members(archive: Path, ending: str) -> Iterator[tuple[str, bytes]]:
    """The names and contents of an archive's files with this ending; removes the archive."""
    try:
        if archive.name.endswith(".whl"):
            with zipfile.ZipFile(archive) as wheel:
                for name in _inside(n for n in wheel.namelist() if n.endswith(ending)):
                    yield name, wheel.read(name)
            return
        with tarfile.open(archive) as source:
            for member in source:
                kept = member.isfile() and member.name.endswith(ending)
                if kept and [*_inside([member.name])] and (file := source.extractfile(member)):
                    yield member.name, file.read()
    finally:
        archive.unlink()


def _inside(names: Iterable[str]) -> Iterator[str]:
    """The names that stay within the folder."""
    return (name for name in names if not name.startswith("/") and ".." not in name.split("/"))
