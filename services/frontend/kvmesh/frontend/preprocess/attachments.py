"""Texts in the place of images and files that a model cannot read. Pure.

A client sends its history with each request, so an image that was refused for ever would end the
session. Only what a person has just sent is refused: a client can take that back.
"""

from collections.abc import Collection, Mapping, Sequence

from kvmesh.frontend.conversation import (
    AttachedFile,
    Block,
    Image,
    Message,
    ResultPart,
    Text,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

IMAGE = "image"
READ_IN = ("user", "tool")  # roles
NONE_REFUSED: Mapping[str, str] = {}
_OMITTED = "[%s omitted: this model cannot read it]"


def readable(
    messages: list[Message],
    images: bool,
    field: str = "messages",
    memo: TurnMemo = NO_MEMO,
    refused: Mapping[str, str] = NONE_REFUSED,
) -> list[Message]:
    """The messages with a text for each image and file that the model cannot read.

    `images`: it reads images, in messages of users and in results of tools, except those of the
    URLs in `refused`, each with the reason. The same list if there is nothing to replace. Raises
    InvalidRequest for what the newest message brings; `field` holds the messages in the body.
    """
    step = "unread", images, frozenset(refused)
    first = memo.first(step, messages, lambda message: _holds(message, images, refused))
    if first == len(messages):
        return messages
    holding = [at for at in range(first, len(messages)) if _holds(messages[at], images, refused)]
    if holding[-1] == _sent_by_a_person(messages):
        _refuse(messages[holding[-1]], images, refused, field)
    found = list(messages)
    for index in holding:
        role, reads = messages[index].role, images and messages[index].role in READ_IN
        shown = [_shown(block, reads, refused) for block in messages[index].blocks]
        found[index] = Message(role, shown, messages[index].generated)
    return found


def images_behind_results(messages: list[Message]) -> list[Message]:
    """The messages with the images of tool results behind all results of the turn.

    For templates that show none within results. The same list if there are none.
    """
    if not any(_is_result_with_image(b) for message in messages for b in message.blocks):
        return messages
    found: list[Message] = []
    waiting: list[Block] = []
    for message in messages:
        blocks: list[Block] = []
        for block in message.blocks if message.role != "assistant" else ():
            if isinstance(block, ToolResult):
                waiting += [part for part in block.content if isinstance(part, Image)]
                blocks.append(_result(block, [_moved(part) for part in block.content]))
            else:
                blocks += [*waiting, block]
                waiting = []
        if message.role == "assistant":
            if waiting:
                found.append(Message("user", waiting))
                waiting = []
            found.append(message)
        else:
            found.append(Message(message.role, blocks, message.generated))
    return [*found, Message("user", waiting)] if waiting else found


def _is_result_with_image(block: Block) -> bool:
    return isinstance(block, ToolResult) and Image in map(type, block.content)


def _moved(part: ResultPart) -> ResultPart:
    return Text("[image: see below]", part.cache) if isinstance(part, Image) else part


def _result(block: ToolResult, content: list[ResultPart]) -> ToolResult:
    return ToolResult(block.call_id, content, block.is_error, block.references, block.cache)


def _is_unread(block: Block, images: bool, refused: Collection[str]) -> bool:
    if isinstance(block, Image):
        return not images or block.url in refused
    return isinstance(block, AttachedFile)


def _holds(message: Message, images: bool, refused: Collection[str]) -> bool:
    images = images and message.role in READ_IN
    for block in message.blocks:
        if type(block) is Text:
            continue  # most are
        if _is_unread(block, images, refused):
            return True
        if isinstance(block, ToolResult):
            for part in block.content:
                if _is_unread(part, images, refused):
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


def _refuse(message: Message, images: bool, refused: Mapping[str, str], field: str) -> None:
    first = next(block for block in message.blocks if _is_unread(block, images, refused))
    if isinstance(first, Image) and first.url in refused:
        reason = f"`{field}`: an image of the newest message cannot be read: {refused[first.url]}."
        raise InvalidRequest(reason, field, "invalid_image")
    what = f"{first.kind}s" if isinstance(first, AttachedFile) else f"{IMAGE}s"
    reason = f"`{field}`: this model does not read {what}; the newest message has one."
    raise InvalidRequest(reason, field)


def _shown(block: Block, images: bool, refused: Collection[str]) -> Block:
    if isinstance(block, ToolResult):
        content = [_placeholder(b) if _is_unread(b, images, refused) else b for b in block.content]
        return _result(block, content)
    return _placeholder(block) if _is_unread(block, images, refused) else block


def _placeholder(block: Block) -> Text:
    """Depends on nothing but the block, so that it is the same in every later prompt."""
    if not isinstance(block, AttachedFile):
        return Text(_OMITTED % IMAGE, getattr(block, "cache", None))
    omitted = _OMITTED % f"{block.kind} {block.name}".rstrip()
    return Text(f"{omitted}\n{block.context}".rstrip(), block.cache)
