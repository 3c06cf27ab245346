"""Output items of the Responses API."""

from typing import Any, NamedTuple

from kvmesh.frontend.apis.base import TokenLogprob
from kvmesh.frontend.apis.content.compaction import sealed_summary
from kvmesh.frontend.apis.sealed_reasoning import seal
from kvmesh.frontend.apis.transcript import PartKind, TranscriptPart
from kvmesh.frontend.conversation import ConversationSummary

RESPONSE_PREFIX = "resp_"
TOKEN_LENGTH = 24  # hexadecimal digits of the token that a response and its items share


class ItemEvents(NamedTuple):
    """Names of the events of one kind of item.

    `delta` and `done` are about its text. `part` begins those about the part that holds the text,
    `part_index` is the field of its place; calls have no parts.
    """

    delta: str
    done: str
    part: str = ""
    part_index: str = ""


MESSAGE = ItemEvents(
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part",
    "content_index",
)
REASONING = ItemEvents(
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part",
    "content_index",
)
SUMMARY = ItemEvents(
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part",
    "summary_index",
)
FUNCTION = ItemEvents(
    "response.function_call_arguments.delta", "response.function_call_arguments.done"
)
CUSTOM = ItemEvents("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done")


class OutputItem:
    """One output item, which grows with its part of the transcript; its id derives from `token`.

    The response's id derives from the same token, so that a reference to the item names it. With
    `summarized` thinking is the item's summary, else its content.
    """

    def __init__(self, index: int, part: TranscriptPart, token: str, summarized: bool) -> None:
        self.index = index
        self.part = part
        self.status = "in_progress"
        self.custom = bool(part.start and part.start.custom)
        self.id = f"{self._prefix()}_{token}{index:02x}"
        self.events = self._events(summarized)
        self.position: dict[str, Any] = {"item_id": self.id, "output_index": index}
        if self.events.part_index:
            self.position[self.events.part_index] = 0
        self.logprobs: list[TokenLogprob] = []

    def _prefix(self) -> str:
        if self.part.kind is PartKind.TEXT:
            return "msg"
        if self.part.kind is PartKind.THINKING:
            return "rs"
        return "ctc" if self.custom else "fc"

    def _events(self, summarized: bool) -> ItemEvents:
        if self.part.kind is PartKind.TEXT:
            return MESSAGE
        if self.part.kind is PartKind.THINKING:
            return SUMMARY if summarized else REASONING
        return CUSTOM if self.custom else FUNCTION

    def content(self, text: str) -> dict[str, Any]:
        """The part of a message or of reasoning that holds the text."""
        if self.events is not MESSAGE:
            kind = "summary_text" if self.events is SUMMARY else "reasoning_text"
            return {"type": kind, "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs,
        }

    def object(self) -> dict[str, Any]:
        """The item with its status; without text while it is in progress."""
        text = self.part.text if self.status != "in_progress" else ""
        if self.part.kind is PartKind.TEXT:
            content = [self.content(text)] if self.status != "in_progress" else []
            head = {"type": "message", "id": self.id, "status": self.status, "role": "assistant"}
            return {**head, "content": content}
        if self.part.kind is PartKind.THINKING:
            return self._reasoning(text)
        return self._call(text)

    def _reasoning(self, text: str) -> dict[str, Any]:
        parts = [self.content(text)] if text else []
        sealed = {"encrypted_content": seal(text)} if text else {}
        summary, content = (parts, []) if self.events is SUMMARY else ([], parts)
        head = {"type": "reasoning", "id": self.id, "summary": summary, "content": content}
        return {**head, **sealed}

    def _call(self, text: str) -> dict[str, Any]:
        start = self.part.start
        if start is None:
            return {}
        head = {"id": self.id, "status": self.status, "call_id": start.id, "name": start.name}
        if start.namespace is not None:
            head["namespace"] = start.namespace
        if self.custom:
            return {"type": "custom_tool_call", **head, "input": text}
        return {"type": "function_call", **head, "arguments": text}


def compaction_item(token: str, summary: ConversationSummary) -> dict[str, Any]:
    """The item that stands for the conversation before an answer's other items."""
    return {
        "type": "compaction",
        "id": f"cmp_{token}00",
        "encrypted_content": sealed_summary(summary),
    }
