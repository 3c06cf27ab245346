"""Texts in the place of images and files that a model cannot read. Pure.

A client sends its history with each request, so an image that was refused for ever would end the
session. Only what a person has just sent is refused: a client can take that back.
"""

from collections.abc import Sequence

from kvmesh.frontend.conversation import AttachedFile, Block, Image, Message, Text, ToolResult
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

IMAGE = "image"
_OMITTED = "[%s omitted: this model cannot read it]"


def readable(
    messages: list[Message], images: bool, field: str = "messages", memo: TurnMemo = NO_MEMO
) -> list[Message]:
    """The messages with a text for each image and file that the model cannot read.

    `images`: it reads images. The same list if there are none. Raises InvalidRequest for one that
    the newest message brings; `field` holds the messages in the body.
    """
    unread: tuple[type, ...] = (AttachedFile,) if images else (AttachedFile, Image)
    first = memo.first(("unread", images), messages, lambda message: _holds(message, unread))
    if first == len(messages):
        return messages
    holding = [at for at in range(first, len(messages)) if _holds(messages[at], unread)]
    if holding[-1] == _sent_by_a_person(messages):
        _refuse(messages[holding[-1]], unread, field)
    found = list(messages)
    for index in holding:
        shown = [_shown(block, unread) for block in messages[index].blocks]
        found[index] = Message(messages[index].role, shown, messages[index].generated)
    return found


def _holds(message: Message, unread: tuple[type, ...]) -> bool:
    for block in message.blocks:
        if type(block) is Text:
            continue  # most are
        if isinstance(block, unread):
            return True
        if isinstance(block, ToolResult):
            for part in block.content:
                if isinstance(part, unread):
                    return True
    return False


def _sent_by_a_person(messages: Sequence[Message]) -> int:
    """The index of the newest message if a person wrote it just now; else -1.

    Texts behind an answer's tool results may come from tools, as images of theirs do in some
    clients. Two texts are two turns that a client has joined: it goes on after a refusal.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.role != "system":
            texts = sum(isinstance(block, Text) for block in message.blocks)
            of_person = message.role == "user" and texts < 2
            return index if of_person and not _follows_results(messages, index) else -1
    return -1


def _follows_results(messages: Sequence[Message], index: int) -> bool:
    """True if there are tool results in the message or before it, since the last answer."""
    for at in range(index, -1, -1):
        if messages[at].role == "assistant":
            return False
        if any(isinstance(block, ToolResult) for block in messages[at].blocks):
            return True
    return False


def _refuse(message: Message, unread: tuple[type, ...], field: str) -> None:
    first = next(block for block in message.blocks if isinstance(block, unread))
    what = f"{first.kind}s" if isinstance(first, AttachedFile) else f"{IMAGE}s"
    reason = f"`{field}`: this model does not read {what}; the newest message has one."
    raise InvalidRequest(reason, field)


def _shown(block: Block, unread: tuple[type, ...]) -> Block:
    if isinstance(block, ToolResult):
        content = [_placeholder(b) if isinstance(b, unread) else b for b in block.content]
        return ToolResult(block.call_id, content, block.is_error, block.references, block.cache)
    return _placeholder(block) if isinstance(block, unread) else block


def _placeholder(block: Block) -> Text:
    """Depends on nothing but the block, so that it is the same in every later prompt."""
    if not isinstance(block, AttachedFile):
        return Text(_OMITTED % IMAGE, getattr(block, "cache", None))
    omitted = _OMITTED % f"{block.kind} {block.name}".rstrip()
    return Text(f"{omitted}\n{block.context}".rstrip(), block.cache)
