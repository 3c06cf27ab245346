"""Puts what differs between folders and users behind what all of an agent's sessions share. Pure.

Claude Code names the project's folder in its system prompt, which most templates write before the
tools, and sends the constant list of its skills behind the user's first message. With another
folder or another first message, the cache holds nothing of what follows. Here the first message
begins with the constant text, then come the folder's sections of the system prompt, then the user's
own text. Messages of another shape stay as they are.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from msgspec.structs import replace

from kvmesh.frontend.conversation import Block, CacheControl, Message, Text

AGENT = "claude-code"
MAX_CHARS = 1 << 18  # of a text to search
HEAD = "<system-reminder>\nThis is a part of the system prompt.\n\n"
FOOT = "\n</system-reminder>"
# Headings of the sections that may name a folder, a user or the state of a repository.
LOCAL_SECTIONS = frozenset(
    ("environment", "memory", "auto memory", "scratchpad directory", "gitstatus", "git status")
)
GIT_STATUS = "gitStatus:"
_LINE = re.compile(r"^(?:# (.*)|```.*)$", re.MULTILINE)
_LOCAL = re.compile(
    r"(?:^|[\s`'\"(])(?:~?/[\w.@+-]+/|[A-Za-z]:\\)|[Ww]orking directory:|[Bb]ranch:", re.MULTILINE
)
# Beginnings of the paragraphs of the text behind the first message that is the same everywhere.
_CONSTANT = re.compile(
    r"^(?:The following (?:deferred tools|skills) are |Available agent types )", re.MULTILINE
)
_VARYING = ("# Environment", "You are powered by", "Today's date")


def shared_prefix(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with their constant text first; the same ones if they have another shape."""
    lead = sum(1 for _ in takewhile(lambda m: m.role == "system", messages))
    if lead == len(messages) or messages[lead].role != "user" or not messages[lead].blocks:
        return messages
    first = messages[lead]
    if isinstance(first.blocks[0], Text) and first.blocks[0].text.startswith(HEAD):
        return messages  # done before
    system, local = _without_local(messages[:lead])
    constant, varying, cache = _start_of_session(messages[lead + 1 : lead + 2])
    shown = [_reminder(texts) for texts in (constant, [*local, *varying]) if texts]
    if not shown:
        return messages
    rest = messages[lead + 2 if constant or varying else lead + 1 :]
    own = [*first.blocks[:-1], _marked(first.blocks[-1], cache)]
    return [*system, Message("user", [*shown, *own]), *rest]


def _reminder(texts: list[str]) -> Text:
    return Text(HEAD + "\n\n".join(texts) + FOOT)


def _marked(block: Block, cache: CacheControl | None) -> Block:
    """The block with the mark of the text that stood behind it."""
    return replace(block, cache=cache) if cache and isinstance(block, Text) else block


def _without_local(system: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The system messages without the sections of the folder, and these sections."""
    kept, local = [], []
    for message in system:
        blocks: list[Block] = []
        for block in message.blocks:
            if isinstance(block, Text) and len(block.text) <= MAX_CHARS:
                parts = list(_sections(block.text))
                local += [part.strip() for part, is_local in parts if is_local]
                block = replace(block, text="".join(part for part, away in parts if not away))
            if not isinstance(block, Text) or block.text or block.cache:
                blocks.append(block)
        kept.append(replace(message, blocks=blocks))
    return kept, local


def _sections(text: str) -> Iterator[tuple[str, bool]]:
    """The sections of a text, which together are the text, and whether each names a folder."""
    if text.startswith(GIT_STATUS):
        yield text, True
        return
    start, heading, fenced = 0, "", False
    for line in _LINE.finditer(text):
        if line[1] is None:
            fenced = not fenced
        elif not fenced:
            yield _section(text[start : line.start()], heading)
            start, heading = line.start(), line[1]
    yield _section(text[start:], heading)


def _section(text: str, heading: str) -> tuple[str, bool]:
    named = heading.strip().casefold() in LOCAL_SECTIONS
    return text, named and _LOCAL.search(text) is not None


def _start_of_session(
    following: Sequence[Message],
) -> tuple[list[str], list[str], CacheControl | None]:
    """Constant and varying text of the system message behind the first one, and its mark.

    Empty for any other message.
    """
    blocks = following[0].blocks if following and following[0].role == "system" else []
    texts = [block.text for block in blocks if isinstance(block, Text)]
    whole = "\n\n".join(texts)
    if len(texts) < len(blocks) or len(whole) > MAX_CHARS or not _CONSTANT.search(whole):
        return [], [], None
    paragraphs = whole.split("\n\n")
    varying = [text.strip() for text in paragraphs if text.startswith(_VARYING)]
    constant = "\n\n".join(text for text in paragraphs if not text.startswith(_VARYING)).strip()
    marks = (block.cache for block in reversed(blocks) if isinstance(block, Text))
    return [constant], varying, next((mark for mark in marks if mark), None)
