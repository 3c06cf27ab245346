"""Sessions of real clients as files that `benchmarks/agents_cache.py` replays.

They hold no keys and none of this machine's folders.
"""

import json
import lzma
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from agent_sessions import ID, SCRIPT, answer_ids
from harnesses.tours import script
from support.harness import INSTALLED, RecordedRequest, Workspace
from support.shares import Turn
from support.tap import Tap

DROPPED = re.compile(
    "authorization|x-api-key|host|content-|accept|connection|cookie|transfer|x-stainless|sec-|te$"
)
NEUTRAL = "/workspace"
# what names an installation of a client: a hash, or a UUID, in JSON within JSON
INSTALLATION = re.compile(r'((?:device|installation)_id\\*": ?\\*")[0-9a-f-]{36,64}')


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
        known |= {value: place for place, value in answer_ids(index, request.answer).items()}
    with lzma.open(folder / f"{name}.jsonl.xz", "wt", preset=9 | lzma.PRESET_EXTREME) as file:
        file.writelines(line + "\n" for line in lines)
    entries = script(lambda _: Path(NEUTRAL))
    with lzma.open(folder / SCRIPT, "wt") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def _headers(request: RecordedRequest) -> dict[str, str]:
    return {k: v for k, v in request.headers.items() if not DROPPED.match(k)}


def _with_placeholders(line: str, known: dict[str, str]) -> str:
    return ID.sub(lambda match: known.get(match[0], match[0]), line)


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
        return INSTALLATION.sub(r"\g<1>none", text)
