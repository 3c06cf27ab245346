"""Scripted answers, from a file with one answer per line.

Each line is a JSON object; the first entry that fits a request answers it:

    {"session": "s1", "turn": 0, "match": "regex", "text": "<think>…</think>…"}

`text` is in the model's own format, including thinking and tool calls. The other fields are
optional: an entry without `session`, `turn` (completed answers before this one, from 0) or `match`
(searched for in the end of the prompt) fits any.
"""

import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

TAIL_TOKENS = 4096


class ScriptError(Exception):
    """A script cannot be read; the message names the file, the line and the fault."""


class ScriptEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a script."""

    text: Annotated[str, Meta(min_length=1)]
    session: str | None = None
    turn: int | None = None
    match: str | None = None


class Script:
    """The entries of a file, in order."""

    def __init__(self, entries: list[ScriptEntry]) -> None:
        self._entries = [(entry, re.compile(entry.match or "")) for entry in entries]
        self.reads_prompts = any(entry.match is not None for entry in entries)

    @classmethod
    def load(cls, file: Path) -> "Script":
        """Read a script; raises ScriptError."""
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ScriptError(f"cannot read the script {file}: {error}") from error
        rows = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
        return cls([_entry(file, number, line) for number, line in rows])

    def find(self, session: str | None, turn: int, prompt_end: str) -> ScriptEntry | None:
        """The first entry that fits the request, if any."""
        for entry, pattern in self._entries:
            if entry.session is not None and entry.session != session:
                continue
            if entry.turn is not None and entry.turn != turn:
                continue
            if pattern.search(prompt_end):
                return entry
        return None


def _entry(file: Path, number: int, line: str) -> ScriptEntry:
    try:
        entry = msgspec.json.decode(line, type=ScriptEntry)
        re.compile(entry.match or "")
    except (msgspec.MsgspecError, re.error) as error:
        raise ScriptError(f"{file}, line {number}: {error}") from error
    return entry
