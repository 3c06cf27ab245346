"""Triton's lists of a kernel's files, which name the folder that holds them."""

import json
from collections.abc import Callable
from pathlib import Path

PREFIX = "__grp__"
_PATHS = "child_paths"


def without_folder(file: Path, content: bytes) -> bytes:
    """The content of a cached file, its paths replaced by names if it is a list of files."""
    return _mapped(file, content, lambda path: Path(path).name)


def with_folder(file: Path, content: bytes) -> bytes:
    """The content of a file from an archive that will be at `file`, its names made paths."""
    return _mapped(file, content, lambda path: str(file.parent / Path(path).name))


def _mapped(file: Path, content: bytes, change: Callable[[str], str]) -> bytes:
    if not file.name.startswith(PREFIX):
        return content
    try:
        group = json.loads(content)
        paths = {str(name): change(str(path)) for name, path in group[_PATHS].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return content  # Triton ignores a malformed list, too
    return json.dumps({_PATHS: paths}, sort_keys=True).encode()
