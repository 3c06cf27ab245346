"""`context_management` of a Messages request: edits of the conversation before it is rendered."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from kvmesh.frontend.apis.base import decode
from kvmesh.frontend.conversation import ClearThinking, ClearToolUses, Compact, ContextEdits
from kvmesh.frontend.errors import InvalidRequest

MAX_EDITS = 16
MAX_INSTRUCTIONS = 1 << 16  # characters
MAX_INT = (1 << 31) - 1
CLEAR_TOOL_USES = "clear_tool_uses_20250919"
CLEAR_THINKING = "clear_thinking_20251015"
COMPACT = "compact_20260112"
DEFAULT_TRIGGER = 100_000  # tokens
DEFAULT_KEEP = 3
Amount = Annotated[int, Meta(ge=0, le=MAX_INT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]


class EditTrigger(Struct):
    type: Literal["input_tokens", "tool_uses"]
    value: Positive


class KeptToolUses(Struct):
    type: Literal["tool_uses"]
    value: Amount


class ClearedTokens(Struct):
    type: Literal["input_tokens"]
    value: Amount


class KeptThinking(Struct):
    type: Literal["thinking_turns", "all"]
    value: Positive | None = None


class ClearToolUsesEdit(Struct):
    type: Literal["clear_tool_uses_20250919"]
    trigger: EditTrigger | None = None
    keep: KeptToolUses | None = None
    clear_at_least: ClearedTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinkingEdit(Struct):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptThinking | None = None


class CompactTrigger(Struct):
    type: Literal["input_tokens"]
    value: Positive


class CompactEdit(Struct):
    type: Literal["compact_20260112"]
    trigger: CompactTrigger | None = None
    pause_after_compaction: bool | None = None
    instructions: Annotated[str, Meta(max_length=MAX_INSTRUCTIONS)] | None = None


EDITS: dict[str, Any] = {
    CLEAR_TOOL_USES: msgspec.json.Decoder(ClearToolUsesEdit),
    CLEAR_THINKING: msgspec.json.Decoder(ClearThinkingEdit),
    COMPACT: msgspec.json.Decoder(CompactEdit),
}
EDIT_TYPES = (ClearToolUsesEdit, ClearThinkingEdit, CompactEdit)
_ANY_EDIT = {"anyOf": [{"$ref": f"#/components/schemas/{t.__name__}"} for t in EDIT_TYPES]}


class ContextManagement(Struct):
    """Edits of other types than `EDIT_TYPES` have no effect."""

    edits: Annotated[
        list[Annotated[Raw, Meta(extra_json_schema=_ANY_EDIT)]], Meta(max_length=MAX_EDITS)
    ] = []


class _Kind(Struct):
    type: str


_kind = msgspec.json.Decoder(_Kind)


def to_edits(body: ContextManagement | None) -> ContextEdits | None:
    """The edits; raises InvalidRequest with the invalid field."""
    if body is None:
        return None
    found = ContextEdits()
    for index, raw in enumerate(body.edits):
        where = f"context_management.edits.{index}"
        decoder = EDITS.get(decode(_kind, bytes(raw), where).type)
        if decoder is None:
            continue
        edit = decode(decoder, bytes(raw), where)
        if isinstance(edit, ClearThinkingEdit):
            _once(found.thinking, where)
            found.thinking = _clear_thinking(edit, where)
        elif isinstance(edit, CompactEdit):
            _once(found.compact, where)
            tokens = None if edit.trigger is None else edit.trigger.value
            pauses = bool(edit.pause_after_compaction)
            found.compact = Compact(tokens, pauses, edit.instructions)
        else:
            _once(found.tool_uses, where)
            found.tool_uses = _clear_tool_uses(edit)
    return found


def unknown_edits(body: ContextManagement | None) -> list[str]:
    """Paths of the edits whose type is unknown."""
    edits = body.edits if body is not None else []
    return [
        f"context_management.edits[{index}]"
        for index, raw in enumerate(edits)
        if _kind.decode(raw).type not in EDITS
    ]


def _once(before: Struct | None, where: str) -> None:
    if before is not None:
        raise InvalidRequest(f"{where}.type: another edit has the same type", f"{where}.type")


def _clear_thinking(edit: ClearThinkingEdit, where: str) -> ClearThinking | None:
    """The edit; None if it keeps all thinking."""
    keep = edit.keep
    if keep == "all" or (keep is not None and keep.type == "all"):
        return None
    if keep is not None and keep.value is None:
        raise InvalidRequest(f"{where}.keep.value: field required", f"{where}.keep.value")
    return ClearThinking(1 if keep is None or keep.value is None else keep.value)


def _clear_tool_uses(edit: ClearToolUsesEdit) -> ClearToolUses:
    trigger = edit.trigger or EditTrigger("input_tokens", DEFAULT_TRIGGER)
    by_tokens, inputs = trigger.type == "input_tokens", edit.clear_tool_inputs
    return ClearToolUses(
        tokens=trigger.value if by_tokens else None,
        uses=None if by_tokens else trigger.value,
        keep=edit.keep.value if edit.keep is not None else DEFAULT_KEEP,
        at_least=edit.clear_at_least.value if edit.clear_at_least is not None else 0,
        exclude=frozenset(edit.exclude_tools or ()),
        inputs=None if inputs is True else frozenset(inputs or ()),
    )
