"""Content blocks of the Messages API, and their translation into the internal form."""

import re
from collections.abc import Collection
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.apis.base import as_json, missing
from kvmesh.frontend.apis.body_types import defined_as
from kvmesh.frontend.apis.cache_ttl import inner_cache_control
from kvmesh.frontend.apis.content.compaction import opened_summary
from kvmesh.frontend.apis.content.files import file_kind, kind_of, text_of
from kvmesh.frontend.apis.content.foreign import plain_text, shown_text, with_sources
from kvmesh.frontend.apis.content.tagged import Foreign, Reading, TaggedDecoder
from kvmesh.frontend.apis.messages.client_tools import MessagesToolBody, cache_control
from kvmesh.frontend.apis.sealed_reasoning import SealedTooLong
from kvmesh.frontend.conversation import (
    GAP,
    AttachedFile,
    Block,
    CacheControl,
    ConversationSummary,
    Image,
    Message,
    ResultPart,
    Text,
    Thinking,
    ToolCall,
    ToolNotice,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.retention.hints import CacheMark

MAX_DEPTH = 4  # of blocks in blocks; each level is read once more
_SHOWN = (Text, Image, AttachedFile)
_OF_ANSWERS = (Thinking, ToolCall, ConversationSummary)
_OF_RESULTS = (*_OF_ANSWERS, ToolResult, ToolNotice)  # what results of tools do not hold
_INDEX = re.compile(r"\.(\d+)")


class TextBlock(Struct, tag="text"):
    text: str | None
    citations: list[Any] | None = None
    cache_control: CacheMark | None = None


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str | None = None
    signature: str | None = None


class ToolUseBlock(Struct, tag="tool_use"):
    name: str
    id: str | None = None
    input: dict[str, Any] | None = None
    cache_control: CacheMark | None = None


class ImageSource(Struct):
    """`type` selects the fields in use."""

    type: str = "base64"
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(Struct, tag="image"):
    source: ImageSource
    cache_control: CacheMark | None = None


_Shown = Annotated[Raw, defined_as(TextBlock | ImageBlock)]


class DocumentSource(ImageSource):
    content: str | list[_Shown] | None = None


class DocumentBlock(Struct, tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheMark | None = None


class SearchResultBlock(Struct, tag="search_result"):
    content: str | list[_Shown]
    source: str | None = None
    title: str | None = None
    cache_control: CacheMark | None = None


class ToolReferenceBlock(Struct, tag="tool_reference"):
    """In a tool result: a deferred tool that is available from there on."""

    tool_name: str


_Returned = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[Annotated[Raw, defined_as(_Returned)]] | dict[str, Any] | None = None
    is_error: bool | None = None
    cache_control: CacheMark | None = None


class ChangedTool(Struct):
    """A tool by name, or the definition of one that `tools` does not list."""

    type: str
    name: str | None = None
    definition: MessagesToolBody | None = None


class ToolAdditionBlock(Struct, tag="tool_addition"):
    tool: ChangedTool


class ToolRemovalBlock(Struct, tag="tool_removal"):
    tool: ChangedTool


class CompactionBlock(Struct, tag="compaction"):
    content: str | None = None
    encrypted_content: str | None = None
    cache_control: CacheMark | None = None


ContentBlock: TypeAlias = (
    CompactionBlock
    | _Returned
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
)
BlockContent: TypeAlias = str | list[Annotated[Raw, defined_as(ContentBlock)]]
_decoder: TaggedDecoder[ContentBlock] = TaggedDecoder(ContentBlock)


class MessagesReading(Reading):
    """Also the tools that the conversation defines, and those that a tool result refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.defined: list[MessagesToolBody] = []
        self.referenced: list[str] = []

    @property
    def is_plain(self) -> bool:
        return super().is_plain and not self.defined

    def skip(self, where: str) -> None:
        self.skipped.append(_INDEX.sub(r"[\1]", where))


def to_messages(
    role: Literal["system", "user", "assistant"],
    content: BlockContent,
    where: str,
    reading: MessagesReading,
) -> list[Message]:
    """The message; an answer with results of tools that the vendor's servers ran is several."""
    blocks = to_blocks(content, where, reading, answer=role == "assistant")
    if role != "assistant" or ToolResult not in map(type, blocks):
        return [Message(role, blocks)]
    runs = groupby(blocks, lambda block: type(block) is ToolResult)
    return [Message("tool" if is_result else role, list(run)) for is_result, run in runs]


def to_blocks(
    content: BlockContent,
    where: str,
    reading: MessagesReading,
    depth: int = 0,
    answer: bool = False,
) -> list[Block]:
    """Blocks of a content; a string is one text block, so that both forms render alike.

    The texts of an `answer` are one text: a gap separates those of other kinds from it. Elsewhere
    what only answers have is left out.
    """
    if isinstance(content, str):
        return [Text(content)] if content else []
    if depth == MAX_DEPTH:
        raise InvalidRequest(f"{where}: blocks are nested too deeply", where)
    blocks: list[Block] = []
    misplaced: Collection[type] = () if answer else _OF_RESULTS if depth else _OF_ANSWERS
    apart = False
    for index, raw in enumerate(content):
        at = f"{where}.{index}"
        decoded = _decoder.decode(raw, at)
        block = _block(decoded, at, reading, depth)
        if block is None:
            continue
        if type(block) in misplaced:
            reading.skip(at)
            continue
        if answer:
            before, apart = apart, type(decoded) is not TextBlock
            beside = (apart or before) and blocks and type(blocks[-1]) in _SHOWN
            if beside and type(block) in _SHOWN:
                blocks.append(Text(GAP))
        blocks.append(block)
    return blocks


def _block(
    block: ContentBlock | Foreign, where: str, reading: MessagesReading, depth: int
) -> Block | None:
    """The internal block; None for what a prompt cannot hold."""
    if isinstance(block, TextBlock):
        text = block.text or ""
        text = with_sources(text, block.citations) if block.citations else text
        return Text(text, cache_control(block.cache_control))
    if isinstance(block, CompactionBlock):
        return _summary(block, where, reading)
    if isinstance(block, ToolUseBlock):
        if not block.name:
            raise missing(f"{where}.name")
        given, cache = as_json(block.input or {}), cache_control(block.cache_control)
        return ToolCall(block.id or "", block.name, given, cache=cache)
    if isinstance(block, ToolResultBlock):
        return _result(block, where, reading, depth)
    if isinstance(block, dict):
        return _foreign(block, where, reading)
    if isinstance(block, ThinkingBlock):
        thinking = _thinking_text(block, where, reading)
        if not thinking and block.signature:
            reading.skip(where)
        return Thinking(thinking)
    if isinstance(block, ToolAdditionBlock | ToolRemovalBlock):
        return _notice(block.tool, isinstance(block, ToolRemovalBlock), reading)
    if isinstance(block, ToolReferenceBlock):
        if depth and block.tool_name:
            reading.referenced.append(block.tool_name)
        else:
            reading.skip(where)
        return None
    cache = cache_control(block.cache_control)
    if isinstance(block, ImageBlock):
        source = block.source
        data = f"data:{source.media_type};base64,{source.data}" if source.data else source.file_id
        return Image(source.url or data or "", cache)
    if isinstance(block, DocumentBlock):
        return _document(block, where, cache, reading, depth)
    texts = _texts(block.content, f"{where}.content", reading, depth)
    return Text(_lines(block.title or "", block.source or "", *texts), cache)


def _summary(block: CompactionBlock, where: str, reading: MessagesReading) -> ConversationSummary:
    """The summary as the client shows it, and what only its opaque form has."""
    try:
        opened = opened_summary(block.encrypted_content, reading.sealed)
    except SealedTooLong:
        name = f"{where}.encrypted_content"
        raise InvalidRequest(f"{name}: too long when decompressed", name) from None
    cache = cache_control(block.cache_control)
    return ConversationSummary(block.content or "", cache, origin=opened.origin if opened else 0)


def _thinking_text(block: ThinkingBlock, where: str, reading: MessagesReading) -> str:
    """The text, which the signature carries if it was omitted from the answer."""
    try:
        return block.thinking or reading.sealed.open(block.signature)
    except SealedTooLong:
        where = f"{where}.signature"
        raise InvalidRequest(f"{where}: too long when decompressed", where) from None


def _notice(changed: ChangedTool, removed: bool, reading: MessagesReading) -> ToolNotice | None:
    if changed.definition is not None:
        reading.defined.append(changed.definition)
    name = changed.definition.name if changed.definition is not None else changed.name
    return ToolNotice(name, removed) if name else None


def _result(block: ToolResultBlock, where: str, reading: MessagesReading, depth: int) -> ToolResult:
    if not block.tool_use_id:
        raise missing(f"{where}.tool_use_id")
    parts = block.content or []
    if isinstance(parts, dict):
        parts = plain_text(parts)
    reading.referenced = []
    blocks = to_blocks(parts, f"{where}.content", reading, depth + 1)
    content = [b for b in blocks if isinstance(b, _SHOWN)]
    names = reading.referenced
    cache = cache_control(block.cache_control) or inner_cache_control(content)
    return ToolResult(block.tool_use_id, content, bool(block.is_error), names, cache)


def _document(
    block: DocumentBlock,
    where: str,
    cache: CacheControl | None,
    reading: MessagesReading,
    depth: int,
) -> Text | AttachedFile:
    """A document with text, or one that no model reads."""
    source, name = block.source, block.title or ""
    if source.type == "text":
        texts = [source.data or ""]
    elif source.type == "content":
        texts = _texts(source.content or [], f"{where}.source.content", reading, depth)
    else:
        text = text_of(source.data or "", source.media_type or "")
        if text is None:
            kind = kind_of(source.media_type or "application/pdf", source.url or "")
            named = name or source.url or source.file_id or ""
            return AttachedFile(kind, named, block.context or "", cache)
        texts = [text]
    return Text(_lines(name, block.context or "", *texts), cache)


def _texts(content: str | list[Raw], where: str, reading: MessagesReading, depth: int) -> list[str]:
    blocks = to_blocks(content, where, reading, depth + 1)
    texts = [block.text for block in blocks if isinstance(block, Text)]
    if len(texts) < len(blocks):
        reading.skip(where)  # images
    return texts


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _foreign(value: Foreign, where: str, reading: MessagesReading) -> Block | None:
    """A block of an unknown type: calls and results of other servers' tools, and other texts."""
    kind, content, cache = value["type"], value.get("content"), _foreign_mark(value)
    if kind.endswith("_tool_use") and isinstance(name := value.get("name"), str) and name:
        given = as_json(value.get("input") or {})
        return ToolCall(_string(value.get("id")), name, given, cache=cache)
    if kind.endswith("_tool_result") and (call := _string(value.get("tool_use_id"))):
        failed = value.get("is_error") is True or _has_error(content)
        shown: list[ResultPart] = [Text(text)] if (text := plain_text(content)) else []
        return ToolResult(call, shown, failed, cache=cache)
    if text := shown_text(value):
        return Text(text, cache)
    if file := file_kind(kind):
        return AttachedFile(file, cache=cache)
    reading.skip(where)
    return None


def _foreign_mark(value: Foreign) -> CacheControl | None:
    try:
        return cache_control(msgspec.convert(value.get("cache_control"), CacheMark | None))
    except msgspec.ValidationError:
        return None


def _has_error(content: Any) -> bool:
    return isinstance(content, dict) and "error_code" in content


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
