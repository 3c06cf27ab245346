"""Transcript of an answer so far, as parts in generation order."""

from enum import Enum

from kvmesh.frontend.conversation import (
    GAP,
    AnswerEvent,
    Block,
    Text,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    is_object,
)


class PartKind(Enum):
    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"


class TranscriptPart:
    """One run of text or thinking, or one tool call with its `start` and arguments as `text`."""

    __slots__ = ("_pieces", "kind", "start")

    def __init__(self, kind: PartKind, start: ToolCallStart | None = None) -> None:
        self.kind = kind
        self.start = start
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def broken(self) -> bool:
        """True for a call whose arguments break off; free text does not show whether it does."""
        return self.start is not None and not self.start.custom and not is_object(self.text)

    @property
    def block(self) -> Block | None:
        """The part as a block of a conversation; None for empty text or thinking."""
        text, call = self.text, self.start
        if call is not None:
            return ToolCall(call.id, call.name, text, call.namespace, call.custom)
        if not text:
            return None
        return Thinking(text) if self.kind is PartKind.THINKING else Text(text)


class Transcript:
    """The parts of one choice."""

    def __init__(self) -> None:
        self.parts: list[TranscriptPart] = []

    def add(self, event: AnswerEvent) -> tuple[TranscriptPart, str] | None:
        """The event's part and the text that it adds; None for the end of a call."""
        if isinstance(event, TextDelta):
            return self._extend(PartKind.TEXT, event.text)
        if isinstance(event, ThinkingDelta):
            return self._extend(PartKind.THINKING, event.text)
        if isinstance(event, ToolCallStart):
            self.parts.append(TranscriptPart(PartKind.CALL, event))
            return self.parts[-1], ""
        if isinstance(event, ToolCallDelta):
            return self._extend(PartKind.CALL, event.arguments)
        return None

    def _extend(self, kind: PartKind, text: str) -> tuple[TranscriptPart, str]:
        if not self.parts or self.parts[-1].kind is not kind:
            self.parts.append(TranscriptPart(kind))
        self.parts[-1].add(text)
        return self.parts[-1], text

    def blocks(self, in_order: bool) -> list[Block]:
        """Blocks as a client returns them: in generation order, or as thinking, text and calls.

        The latter holds for APIs with one field per kind.
        """
        if in_order:
            return [block for part in self.parts if (block := part.block) is not None]
        thinking, text = self.joined(PartKind.THINKING), self.joined(PartKind.TEXT)
        blocks: list[Block] = [Thinking(thinking)] if thinking else []
        blocks += [Text(text)] if text else []
        return blocks + [block for part in self.calls if (block := part.block) is not None]

    @property
    def calls(self) -> list[TranscriptPart]:
        return [part for part in self.parts if part.kind is PartKind.CALL]

    def joined(self, kind: PartKind) -> str:
        """The texts of one kind, as APIs with one field for them show those of several parts."""
        return GAP.join(part.text for part in self.parts if part.kind is kind)
