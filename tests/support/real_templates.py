"""Chat templates of released packages, read from their source distributions at test time.

`python real_templates.py FOLDER PACKAGE...` fetches them from the package index that pip uses.
"""

import base64
import hashlib
import json
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, NamedTuple

FOLDER = Path(__file__).parents[2] / ".templates"
ATTEMPTS = 3
TIMEOUT_S = 60
_JSON, _HTML = "application/vnd.pypi.simple.v1+json", "text/html;q=0.5"


class Release(NamedTuple):
    """A source distribution, and the templates of models in it."""

    file: str
    sha256: str
    members: str


RELEASES = {
    "trl": Release(
        "trl-1.9.2.tar.gz",
        "8107d5c6d45478205aead0f211e6bbc2f673388421972de635fe40ae1d5f5e61",
        r"trl/chat_templates/(.+)\.jinja",
    ),
    "llama-cpp-python": Release(
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        r"vendor/llama\.cpp/models/templates/(.+)\.jinja",
    ),
    "vllm": Release(
        "vllm-0.33.0.tar.gz",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        r"examples/(?!pooling)(?:.+/)?(.+)\.jinja",
    ),
}


def templates(*packages: str) -> dict[str, str]:
    """Templates of the packages that were fetched, by package and name."""
    found = {}
    for package in packages:
        for path in sorted((FOLDER / package).glob("*.jinja")):
            found[f"{package}/{path.stem}"] = path.read_text(encoding="utf-8")
    return found


def fetch(package: str, folder: Path) -> None:
    """Fetch the templates of a package, unless the folder has them."""
    release, target = RELEASES[package], folder / package
    if target.exists():
        return
    archive = folder / release.file
    for index in _indexes():
        url = f"{index.rstrip('/')}/{package}/"
        try:
            _download(_link(url, release.file), archive)
            break
        except OSError as error:
            print(f"{url}: {error}", file=sys.stderr)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != release.sha256:
        archive.unlink()
        raise OSError(f"{release.file} has the SHA-256 {found}")
    part = target.with_suffix(".part")
    part.mkdir(exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            match = re.fullmatch(rf"[^/]+/{release.members}", member.name)
            content = tar.extractfile(member) if match and member.isfile() else None
            if match and content:
                (part / f"{match[1].replace('/', '-')}.jinja").write_bytes(content.read())
    part.rename(target)
    archive.unlink()


def _indexes() -> list[str]:
    """The package indexes that pip is configured to use."""
    options = _options()
    urls = [options.get("index-url", "https://pypi.org/simple")]
    return [*urls, *options.get("extra-index-url", "").split()]


def _options() -> dict[str, str]:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # from the weakest source to the strongest, as pip reads them
    lines = re.findall(r"^(global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    return {name: value for _, name, value in sorted(lines, key=lambda line: line[0] == ":env:")}


def _link(url: str, file: str) -> str:
    """The address of a file that a project's page of the index lists."""
    with _open(url, f"{_JSON}, {_HTML}") as page:
        base, text = page.geturl(), page.read().decode()  # type: ignore[attr-defined]
    try:
        links = {each["filename"]: each["url"] for each in json.loads(text)["files"]}
    except ValueError:
        found = re.findall(r'<a[^>]*href="([^"#]+)[^>]*>\s*([^<\s]+)', text)
        links = {name: address for address, name in found}
    if file not in links:
        raise OSError(f"{file} is not listed")
    return urllib.parse.urljoin(base, links[file])


def _download(url: str, target: Path) -> None:
    for attempt in range(ATTEMPTS):
        try:
            with _open(url, "*/*") as source, target.open("wb") as file:
                while part := source.read(1 << 20):
                    file.write(part)
            return
        except OSError:
            if attempt == ATTEMPTS - 1:
                raise


def _open(url: str, accept: str) -> IO[bytes]:
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept}
    if parts.username:
        user = f"{parts.username}:{parts.password or ''}"
        secret = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {secret}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    context = ssl.create_default_context(cafile=_options().get("cert"))
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)  # type: ignore[no-any-return]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(exist_ok=True)
    for name in sys.argv[2:]:
        fetch(name, place)
