"""The environment of an engine: everything that code compiled for it depends on."""

import hmac
import json
import os
import platform
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvmesh.settings.schema import Settings
from kvmesh.worker.compiled.archive import FORMAT

COMMAND_S = 10.0
VERSION_FILES = {"torch": "version.py", "vllm": "_version.py"}  # with the revision of the source
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
_PURPOSE = b"kvmesh compile cache\0"


class CompileEnvironment:
    """Named facts; two equal environments may use each other's compiled code."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self._encoded = json.dumps(facts, sort_keys=True, default=str).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the facts, in hexadecimal; the name of the cache on this node."""
        return sha256(self._encoded).hexdigest()

    def label(self, domain_key: bytes) -> str:
        """Name of the environment in the mesh: equal only among holders of the domain's key."""
        return self._mac(domain_key, b"label")

    def mac(self, domain_key: bytes, archive: str) -> str:
        """Proof by the domain's key that the archive with this digest is for this environment."""
        return self._mac(domain_key, b"archive\0" + archive.encode())

    def _mac(self, key: bytes, purpose: bytes) -> str:
        body = sha256(self._encoded).digest()
        return hmac.digest(key, _PURPOSE + body + purpose, "sha256").hex()


def engine_environment(settings: Settings, folder: Path) -> CompileEnvironment:
    """Describe the machine, the installed packages, the model in `folder` and its engine.

    Blocks for up to a second, and longer if a driver does not answer.
    """
    return CompileEnvironment(
        {
            "format": FORMAT,
            "python": [sys.version, sys.prefix],
            "packages": _packages(),
            "versions": {name: _version(name, file) for name, file in VERSION_FILES.items()},
            "machine": [platform.machine(), *platform.libc_ver(), _os_release()],
            "cpu": _cpu(),
            "threads": os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)),
            "compiler": _output(os.environ.get("CXX") or "g++", "--version").partition("\n")[0],
            "gpus": _gpus(),
            "model": [str(folder), {name: _digest(folder / name) for name in MODEL_FILES}],
            "engine": _arguments(settings),
        }
    )


def _packages() -> list[str]:
    """Names and versions of everything installed, from the names of the metadata's folders."""
    found = {
        path.stem
        for folder in map(Path, sys.path)
        for pattern in ("*.dist-info", "*.egg-info")
        for path in folder.glob(pattern)
    }
    return sorted(found)


def _version(package: str, file: str) -> str:
    """Digest of a package's file, without importing the package; empty if it is missing."""
    spec = find_spec(package)
    origin = spec.origin if spec is not None else None
    return _digest(Path(origin).parent / file) if origin else ""


def _digest(file: Path) -> str:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _os_release() -> str:
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return ""
    return f"{release.get('ID')} {release.get('VERSION_ID')}"


def _cpu() -> list[str]:
    """Model and abilities of the first core."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    lines = (line.partition(":") for line in first.splitlines())
    return [f"{key.strip()}:{value}" for key, _, value in lines if key.strip() in CPU_FIELDS]


def _gpus() -> list[str]:
    """Driver and kinds of the GPUs; empty without one."""
    query = ("--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    nvidia = _output("nvidia-smi", *query).splitlines()
    nodes = sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"))
    properties = [line for node in nodes for line in _lines(node) if "gfx_target" in line]
    drivers = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
    return sorted({*nvidia, *properties, *(line for file in drivers for line in _lines(file))})


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _output(command: str, *arguments: str) -> str:
    """Output of a command; empty if there is none or it fails."""
    path = shutil.which(command)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _arguments(settings: Settings) -> dict[str, Any]:
    worker, vllm = settings.worker, settings.vllm
    return {
        "name": worker.engine,
        "vllm": msgspec.to_builtins(vllm, enc_hook=str),
        "args_file": _digest(vllm.args_file) if vllm.args_file else "",
        "worker": [worker.block_size, worker.context, worker.serves, worker.max_adapters],
    }
