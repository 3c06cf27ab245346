"""Parts of a message's content in the OpenAI APIs, and their translation."""

from typing import Annotated, Any, TypeAlias

from msgspec import Raw, Struct

from kvmesh.frontend.apis.body_types import defined_as
from kvmesh.frontend.apis.cache_ttl import CacheBreakpoint, to_cache_control
from kvmesh.frontend.apis.content.files import file_kind, kind_of, split_data_url, text_of
from kvmesh.frontend.apis.content.foreign import (
    THOUGHTS,
    shown_text,
    thought_text,
    with_sources,
)
from kvmesh.frontend.apis.content.tagged import Foreign, Reading, TaggedDecoder
from kvmesh.frontend.conversation import (
    GAP,
    AttachedFile,
    Block,
    CacheControl,
    Image,
    ResultPart,
    Text,
    Thinking,
)


class TextPart(Struct, tag="text"):
    text: str | None
    annotations: list[Any] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputTextPart(TextPart, tag="input_text"):
    pass


class OutputTextPart(TextPart, tag="output_text"):
    pass


class SummaryTextPart(TextPart, tag="summary_text"):
    pass


class ReasoningTextPart(TextPart, tag="reasoning_text"):
    pass


class RefusalPart(Struct, tag="refusal"):
    refusal: str | None = None


class ImagePart(Struct, tag="image_url"):
    image_url: str | dict[str, Any] | None = None
    file_id: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputImagePart(ImagePart, tag="input_image"):
    pass


class AudioPart(Struct, tag="input_audio"):
    input_audio: Any = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class FileBody(Struct):
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None


class FilePart(Struct, tag="file"):
    file: FileBody | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputFilePart(FileBody, tag="input_file"):
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Part: TypeAlias = (
    TextPart
    | InputTextPart
    | OutputTextPart
    | SummaryTextPart
    | ReasoningTextPart
    | RefusalPart
    | ImagePart
    | InputImagePart
    | AudioPart
    | FilePart
    | InputFilePart
)
Content: TypeAlias = str | list[Annotated[Raw, defined_as(Part)]]
_decoder: TaggedDecoder[Part] = TaggedDecoder(Part)


def content_blocks(content: Content | None, where: str, reading: Reading) -> list[ResultPart]:
    """The blocks of a content; a string is one text, so that both forms render alike."""
    if isinstance(content, str):
        return [Text(content)] if content else []
    blocks = []
    for index, raw in enumerate(content or ()):
        place = f"{where}[{index}]"
        block = _block(_decoder.decode(raw, place), place, reading)
        if block is not None:
            blocks.append(block)
    return blocks


def answer_blocks(content: Content | None, where: str, reading: Reading) -> list[Block]:
    """The blocks of an answer, which may have parts of thinking.

    Its texts are one text: a gap separates those of other kinds from it.
    """
    if content is None or isinstance(content, str):
        return [Text(content)] if content else []
    blocks: list[Block] = []
    apart = False
    for index, raw in enumerate(content):
        place = f"{where}[{index}]"
        part = _decoder.decode(raw, place)
        if thought := _thought(part):
            blocks.append(Thinking(thought))
            continue
        block = _block(part, place, reading)
        if block is None:
            continue
        before, apart = apart, not isinstance(part, TextPart)
        if (apart or before) and blocks and not isinstance(blocks[-1], Thinking):
            blocks.append(Text(GAP))
        blocks.append(block)
    return blocks


def _thought(part: Part | Foreign) -> str:
    """The text of a part that is thinking; else empty."""
    if isinstance(part, dict):
        return thought_text(part) if part["type"] in THOUGHTS else ""
    if isinstance(part, ReasoningTextPart | SummaryTextPart):
        return part.text or ""
    return ""


def _block(part: Part | Foreign, where: str, reading: Reading) -> ResultPart | None:
    if isinstance(part, TextPart):
        text = part.text or ""
        text = with_sources(text, part.annotations) if part.annotations else text
        return Text(text, to_cache_control(part.prompt_cache_breakpoint))
    if isinstance(part, dict):
        return _foreign(part, where, reading)
    if isinstance(part, RefusalPart):
        return Text(part.refusal or "")
    cache = to_cache_control(part.prompt_cache_breakpoint)
    if isinstance(part, ImagePart):
        url = part.image_url
        found = url if isinstance(url, str) else str((url or {}).get("url", ""))
        return Image(found or part.file_id or "", cache)
    if isinstance(part, AudioPart):
        return AttachedFile("audio file", cache=cache)
    return _file(part if isinstance(part, FileBody) else part.file or FileBody(), cache)


def _foreign(part: Foreign, where: str, reading: Reading) -> Text | AttachedFile | None:
    """The text of a part of an unknown type, or the file that its type names."""
    if text := shown_text(part):
        return Text(text)
    kind = file_kind(part["type"])
    if kind is not None:
        return AttachedFile(kind)
    reading.skipped.append(where)
    return None


def _file(file: FileBody, cache: CacheControl | None) -> Text | AttachedFile:
    """A text file, named by its first line, or one that no model reads."""
    name = file.filename or file.file_url or file.file_id or ""
    media_type, data = split_data_url(file.file_data or "")
    text = text_of(data, media_type)
    if text is not None:
        return Text(f"{name}\n{text}".lstrip("\n"), cache)
    return AttachedFile(kind_of(media_type, name), name, cache=cache)
