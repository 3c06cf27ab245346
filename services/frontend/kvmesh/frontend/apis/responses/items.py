"""Output items of the Responses API."""

from typing import Any

from kvmesh.frontend.apis.base import TokenLogprob
from kvmesh.frontend.apis.sealed_reasoning import seal
from kvmesh.frontend.apis.transcript import PartKind, TranscriptPart

RESPONSE_PREFIX = "resp_"
TOKEN_LENGTH = 24  # hexadecimal digits of the token that a response and its items share


class OutputItem:
    """One output item, which grows with its part of the transcript; its id derives from `token`.

    The response's id derives from the same token, so that a reference to the item names it.
    """

    def __init__(self, index: int, part: TranscriptPart, token: str) -> None:
        self.index = index
        self.part = part
        self.custom = bool(part.start and part.start.custom)
        self.id = f"{self._prefix()}_{token}{index:02x}"
        self.logprobs: list[TokenLogprob] = []

    def _prefix(self) -> str:
        if self.part.kind is PartKind.TEXT:
            return "msg"
        if self.part.kind is PartKind.THINKING:
            return "rs"
        return "ctc" if self.custom else "fc"

    def content(self, text: str) -> dict[str, Any]:
        """The content part of a message."""
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs,
        }

    def object(self, status: str) -> dict[str, Any]:
        """The item with this status; without text if it is "in_progress"."""
        text = self.part.text if status != "in_progress" else ""
        if self.part.kind is PartKind.TEXT:
            content = [self.content(text)] if status != "in_progress" else []
            head = {"type": "message", "id": self.id, "status": status, "role": "assistant"}
            return {**head, "content": content}
        if self.part.kind is PartKind.THINKING:
            return self._reasoning(text)
        return self._call(text, status)

    def _reasoning(self, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        sealed = {"encrypted_content": seal(text)} if text else {}
        return {"type": "reasoning", "id": self.id, "summary": [], "content": content, **sealed}

    def _call(self, text: str, status: str) -> dict[str, Any]:
        start = self.part.start
        if start is None:
            return {}
        head = {"id": self.id, "status": status, "call_id": start.id, "name": start.name}
        if start.namespace is not None:
            head["namespace"] = start.namespace
        if self.custom:
            return {"type": "custom_tool_call", **head, "input": text}
        return {"type": "function_call", **head, "arguments": text}
