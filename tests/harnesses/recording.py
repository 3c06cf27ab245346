"""Sessions of real clients as files that `benchmarks/agents_cache.py` replays.

A file holds one request per line, compressed by xz. Ids that the mesh gave in its answers stand in
later bodies as ⟦REQUEST.NAME.N⟧: the N-th distinct value of the key NAME in the answer to REQUEST.
"""

import json
import lzma
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harnesses.tours import script
from support.harness import INSTALLED, RecordedRequest, Workspace
from support.shares import Turn
from support.tap import Tap

ID = re.compile(r"[a-z]+[_-][0-9a-f]{20,}")
ID_KEYS = ("id", "call_id", "response_id")
DROPPED = re.compile(
    "authorization|x-api-key|host|content-|accept|connection|cookie|transfer|x-stainless|sec-|te$"
)
NEUTRAL = "/workspace"


def record(folder: Path, name: str, found: Sequence[Turn], tap: Tap, workspace: Workspace) -> None:
    """Write a client's session into `folder`, and the script beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    neutral = _Neutral(workspace)
    known: dict[str, str] = {}
    lines = []
    for index, turn in enumerate(found):
        request = turn.request
        line = {
            "path": request.path,
            "headers": _headers(request),
            "body": request.body,
            "answer": tap.answer(request.id),
            "previous": turn.previous,
        }
        lines.append(neutral(_with_placeholders(json.dumps(line, ensure_ascii=False), known)))
        known |= _ids(index, request.answer)
    with lzma.open(folder / f"{name}.jsonl.xz", "wt", preset=9 | lzma.PRESET_EXTREME) as file:
        file.writelines(line + "\n" for line in lines)
    entries = script(lambda _: Path(NEUTRAL))
    with lzma.open(folder / "script.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def _headers(request: RecordedRequest) -> dict[str, str]:
    return {k: v for k, v in request.headers.items() if not DROPPED.match(k)}


def _with_placeholders(line: str, known: dict[str, str]) -> str:
    return ID.sub(lambda match: known.get(match[0], match[0]), line)


def _ids(index: int, answer: bytes) -> dict[str, str]:
    """Placeholders of the ids in an answer."""
    found: dict[str, list[str]] = {key: [] for key in ID_KEYS}
    for key, value in _strings(_parts(answer)):
        if key in found and ID.fullmatch(value) and value not in found[key]:
            found[key].append(value)
    return {
        value: f"⟦{index}.{key}.{number}⟧"
        for key in reversed(ID_KEYS)
        for number, value in enumerate(found[key])
    }


def _parts(answer: bytes) -> list[Any]:
    """The JSON objects of an answer, streamed or not."""
    text = answer.decode()
    if text.lstrip().startswith("{"):
        return [json.loads(text)]
    lines = (line[6:] for line in text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def _strings(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        yield name, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _strings(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value, name)


class _Neutral:
    """Replaces this machine's folders and kernel by neutral names."""

    def __init__(self, workspace: Workspace) -> None:
        names = {
            str(workspace.repository): NEUTRAL,
            str(workspace.home): "/home/user",
            str(INSTALLED.parents[1]): "/opt/agents",
        }
        slugs = {re.sub("[^A-Za-z0-9]", "-", k): v.replace("/", "-") for k, v in names.items()}
        self._names = {**names, **slugs, platform.release(): "6.12.0"}

    def __call__(self, text: str) -> str:
        for name, neutral in self._names.items():
            text = text.replace(name, neutral)
        return text
