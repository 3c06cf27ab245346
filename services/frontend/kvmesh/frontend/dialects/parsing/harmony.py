"""Parser of gpt-oss's "harmony" response format: messages on channels, calls by recipient.

A message is `<|start|>` HEADER `<|message|>` CONTENT and an end token. The header has the author's
role, a channel (`<|channel|>analysis`, `commentary`, `final`), a recipient (`to=functions.NAME`)
behind the role or the channel, and the type of the content (`json`, `<|constrain|>json`). The
prompt usually ends within the header of the first message. The parser reads the text of special
tokens, not their ids, and so needs no vocabulary file.
"""

import re
from collections.abc import Callable

from kvmesh.frontend.conversation import TextDelta, ThinkingDelta, Tool
from kvmesh.frontend.dialects.parsing.coerce import property_kinds
from kvmesh.frontend.dialects.parsing.emitter import Delta
from kvmesh.frontend.dialects.parsing.literals import JSON, Transcoder, quoted
from kvmesh.frontend.dialects.parsing.parser import StreamParser
from kvmesh.frontend.dialects.parsing.source import MalformedOutput, MarkerSet, Steps, Unfinished

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
MAX_HEADER = 512
ASSISTANT = "assistant"
# Ends a message of thinking and begins the answer.
ANSWER = f"{ENDS[0]}{START}{ASSISTANT}{CHANNEL}final{MESSAGE}"

_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.:/\-]+)")
# models may omit the marker between their role and a channel
_CHANNEL = re.compile(rf"(?:<\|channel\|>\s*|\b{ASSISTANT})(\w+)")
_ROLE = re.compile(rf"\s*(?!to=)({ASSISTANT}(?=analysis|commentary|final)|[\w.:/\-]+)")
# the part of a header before its first marker, and what may become one
_LEAD = re.compile(rf"\s*(?:{ASSISTANT})?\s*(?:to=[\w.:/\-]+\s*\w*)?\s*")
_LEAD_BEGINS = re.compile(r"\s*(?:t|to|to=[\w.:/\-]*\s*\w*)?\s*")
# a header that breaks off, which has nothing to show
_HEADER_BEGINS = re.compile(
    rf"(?:<\|start\|>)?{_LEAD.pattern}(?:<\|channel\|>\s*\w*)?\s*(?:to=[\w.:/\-]*)?\s*"
    r"(?:<\|constrain\|>)?\s*\w*\s*(?:<\|?\w*)?"
)
_HEADER = re.compile(r"<\|channel\|>[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_READERS = ("user", "all", ASSISTANT)  # recipients that are no tools
_HEADER_ENDS = MarkerSet([MESSAGE, START, *ENDS])
_BODY_ENDS = MarkerSet([START, CHANNEL, *ENDS])
_STARTS = MarkerSet(MARKERS)


class HarmonyParser(StreamParser):
    """Maps the analysis channel to thinking, messages to functions to calls, all else to text.

    Messages to tools that the request lacks, and those of other authors than the assistant, are
    thinking as well. `prompt` may end within a message.
    """

    def __init__(
        self,
        tools: list[Tool],
        new_id: Callable[[], str],
        eager: bool,
        prompt: str = "",
        calls: bool = True,
    ) -> None:
        super().__init__(tools, new_id, eager)
        self._has_tools = bool(tools)
        self._reads_calls = calls
        self._begun = _open_message(prompt)

    def _read(self) -> Steps[None]:
        source, emitter, begun = self._source, self._emitter, self._begun
        if MESSAGE in begun:
            yield from self._body(self._kind(begun.partition(MESSAGE)[0]))
        elif CHANNEL in begun:
            yield from self._message(begun)
        while True:
            lead, stop = yield from self._lead()
            source.pos -= len(stop)
            if lead and (stop == START or stop in ENDS):
                emitter.write(lead)
                lead = ""
            if stop in ENDS:
                source.pos += len(stop)
            else:
                yield from self._message(lead)

    def _lead(self) -> Steps[tuple[str, str]]:
        """Emit text up to a marker: (what belongs to the header before the marker, marker)."""
        source, lead = self._source, ""
        source.mark()
        while True:
            try:
                text, stop = yield from source.until(_STARTS)
            except Unfinished:
                self._emitter.write(lead)
                raise
            lead += text
            if stop is None and len(lead) <= MAX_HEADER and _may_lead(lead):
                continue
            source.release()
            if stop and _LEAD.fullmatch(lead):
                return lead, stop
            self._emitter.write(lead)
            while stop is None:
                text, stop = yield from source.until(_STARTS)
                self._emitter.write(text)
            return "", stop

    def _message(self, lead: str) -> Steps[None]:
        header = yield from self._header(lead)
        if header is None:
            return
        self._emitter.boundary()
        kind = self._kind(header)
        recipient = _RECIPIENT.search(header)
        if recipient and self._reads_calls and self._is_call(recipient):
            yield from self._call(recipient[2], "json" in header)
        yield from self._body(kind)
        self._emitter.boundary()

    def _is_call(self, recipient: re.Match[str]) -> bool:
        known = self._has_tools and self._emitter.known(recipient[2])
        return recipient[1] is not None or known

    def _kind(self, header: str) -> Delta:
        """The kind of a message's content, if that is no call."""
        channel, role = _CHANNEL.search(header), _ROLE.match(header.removeprefix(START))
        recipient = _RECIPIENT.search(header)
        if channel and channel[1] == "analysis":
            return ThinkingDelta
        if role and role[1] != ASSISTANT:
            return ThinkingDelta
        if recipient and recipient[2] not in _READERS and not self._is_call(recipient):
            return ThinkingDelta
        return TextDelta

    def _header(self, lead: str) -> Steps[str | None]:
        """Read up to the content; None if no content follows, with the header emitted as text.

        `lead`: the header's part that is read.
        """
        source = self._source
        source.mark()
        start, stop = (yield from source.literal(START)), None
        header = lead + (start or "")
        while stop is None and len(header) <= MAX_HEADER:
            try:
                text, stop = yield from source.until(_HEADER_ENDS)
            except Unfinished:
                if not _HEADER_BEGINS.fullmatch(header):
                    self._emitter.write(header.removeprefix(START))
                raise
            header += text
        source.release()
        if stop == MESSAGE:
            return header
        if stop is not None:
            source.pos -= len(stop)
        self._emitter.write(header.removeprefix(START))
        return None

    def _call(self, name: str, is_json: bool) -> Steps[None]:
        """Read a call; content that is not its arguments is left to be read as text."""
        source, emitter = self._source, self._emitter
        emitter.begin_attempt(0)
        emitter.name(name)
        try:
            if (yield from source.skip_space()) == "{":
                yield from Transcoder(source, emitter.arguments, JSON, (START, *ENDS)).object()
            elif argument := None if is_json else self._only_text():
                yield from self._free_text(argument)
            elif (yield from source.follows((START, *ENDS))):
                emitter.arguments("{}")
            else:
                raise MalformedOutput
            emitter.end()
        except Unfinished:
            raise
        except MalformedOutput:
            emitter.fail_attempt()

    def _only_text(self) -> str | None:
        """The argument of a tool that takes one text, such as code."""
        schema = self._emitter.schema()
        names = list(schema.get("properties") or ())
        return (
            names[0] if len(names) == 1 and "string" in property_kinds(schema, names[0]) else None
        )

    def _free_text(self, argument: str) -> Steps[None]:
        self._emitter.arguments(f'{{"{quoted(argument)}": "')
        stop = None
        while stop is None:
            text, stop = yield from self._source.until(_BODY_ENDS)
            self._emitter.arguments(quoted(text))
        self._source.pos -= len(stop)
        self._emitter.arguments('"}')

    def _body(self, kind: Delta) -> Steps[None]:
        source = self._source
        while True:
            stop = yield from self._copy(_BODY_ENDS, kind)
            if stop == START:
                source.pos -= len(START)
                return
            if stop in ENDS:
                return
            if stop == CHANNEL:
                # the next message, behind one without an end
                source.pos -= len(CHANNEL)
                if (yield from self._header_here()):
                    return
                source.pos += len(CHANNEL)
                self._emitter.write(CHANNEL, kind)

    def _header_here(self) -> Steps[bool]:
        source = self._source
        while True:
            rest = source.text[source.pos : source.pos + MAX_HEADER]
            marker = _HEADER_ENDS.find(rest, 0)
            if marker or len(rest) == MAX_HEADER or source.closed:
                return _HEADER.match(rest) is not None
            yield


def _open_message(prompt: str) -> str:
    """The part of a message that ends the prompt, from its author's role on."""
    begun = prompt[prompt.rfind(START) + len(START) :] if START in prompt else ""
    return "" if any(end in begun for end in ENDS) else begun


def _may_lead(text: str) -> bool:
    """True if the part of a header before its first marker may begin with `text`."""
    text = text.lstrip()
    if ASSISTANT.startswith(text):
        return True
    return _LEAD_BEGINS.fullmatch(text.removeprefix(ASSISTANT)) is not None
