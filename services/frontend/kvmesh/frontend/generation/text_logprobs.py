"""Log-probabilities of the tokens that make the visible text of an answer. Pure.

A token belongs to the text that it completes. It is listed once, with the bytes of it that the text
shows, so that the bytes of all entries are those of the text; tokens of thinking, of calls and of
their syntax are not listed.
"""

from collections import deque

from kvmesh.frontend.apis.base import TokenLogprob, TopLogprob
from kvmesh.frontend.conversation import GAP, AnswerEvent, TextDelta, ThinkingDelta
from kvmesh.frontend.dialects.output import OutputParser
from kvmesh.frontend.tokenizer.detokenizer import TokenTexts

NOWHERE = -1
_GAP = GAP.encode()
Settled = list[tuple[AnswerEvent, list[TokenLogprob]]]


class LoggedToken:
    """A token with the offsets of its bytes in the output, and those to be shown.

    `listed`: the answer has its log-probability.
    """

    __slots__ = ("end", "id", "known", "listed", "shown", "start")

    def __init__(self, token: int, known: dict[int, float] | None) -> None:
        self.id = token
        self.known = known
        self.start = self.end = 0
        self.shown = b""
        self.listed = False


class TextLogprobs:
    """A parser that passes on the events of `parser` and notes which tokens their text is from.

    Call `add` before each token is fed, `settle` with the events that are shown, and `flush` at
    the end. Each token lists at most `most` alternatives. `by_id`: tokens are named by their ids.
    """

    def __init__(
        self, parser: OutputParser, texts: TokenTexts, most: int, by_id: bool = False
    ) -> None:
        self._parser = parser
        self._texts = texts
        self._most = most
        self._by_id = by_id
        self._unread: list[LoggedToken] = []  # tokens that have completed no text
        self._carried = b""  # bytes of read tokens that have completed no text
        self._tokens: deque[LoggedToken] = deque()  # tokens with bytes that may be shown
        self._output = bytearray()  # from the offset `_base` on
        self._base = 0
        self._fed = 0  # offset of the last text fed
        self._read = 0  # offset behind the last text found
        self._last = (0, b"")  # the last text found, and where its search began
        self._kind: type[AnswerEvent] | None = None
        self._found: deque[tuple[int, int]] = deque()  # offsets and sizes of text not yet shown
        self._open: LoggedToken | None = None
        self._ready: list[tuple[bytes, LoggedToken | None]] = []

    @property
    def in_call(self) -> bool:
        return self._parser.in_call

    def add(self, token: int, known: dict[int, float] | None) -> None:
        """The next token, and its known log-probabilities with those of alternatives."""
        if self._texts.is_shown(token):
            self._unread.append(LoggedToken(token, known))

    def feed(self, text: str) -> list[AnswerEvent]:
        self._assign(text.encode())
        return self._match(self._parser.feed(text))

    def finish(self) -> list[AnswerEvent]:
        return self._match(self._parser.finish())

    def settle(self, events: list[AnswerEvent]) -> Settled:
        """The events with the tokens of their text; text waits for the end of its last token."""
        settled: Settled = []
        for event in events:
            if isinstance(event, TextDelta):
                self._show(event.text.encode())
                settled += self._take()
            else:
                settled += [*self.flush(), (event, [])]
        return settled

    def flush(self) -> Settled:
        """The text that waits."""
        self._close()
        return self._take()

    # --- tokens and output ---

    def _assign(self, data: bytes) -> None:
        """Give the bytes of new text to the tokens since the last text."""
        tokens, self._unread = self._unread, []
        pieces = [self._texts.token_bytes(token.id) for token in tokens]
        carried, at = self._carried, self._end
        whole = carried + b"".join(pieces)
        if not whole.startswith(data):
            # the bytes of single tokens are not those in the text: all to the last one
            whole, carried = data, b""
            pieces = [*[b""] * (len(pieces) - 1), data][: len(pieces)]
        self._carried = whole[len(data) :]
        self._output += data
        self._fed = at
        end = at + len(carried)
        for token, piece in zip(tokens, pieces, strict=True):
            token.start = end if token is not tokens[0] else at
            end = min(end + len(piece), self._end)
            token.end = end
        self._tokens += tokens

    @property
    def _end(self) -> int:
        return self._base + len(self._output)

    # --- events and output ---

    def _match(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """Find the texts of the parser's events, which are in order, in the output."""
        for event in events:
            kind = type(event)
            if isinstance(event, TextDelta | ThinkingDelta):
                data = event.text.encode()
                start = self._find(data, kind is self._kind)
                if start == NOWHERE and data.startswith(_GAP):
                    # the parser has made the gap, but not the text
                    data = data.removeprefix(_GAP)
                    self._found.append((NOWHERE, len(_GAP)))
                    start = self._find(data, False)
                if kind is TextDelta:
                    self._found.append((start, len(data)))
                if start != NOWHERE:
                    self._last = (self._read, data)
                    self._read = start + len(data)
                    self._forget()
            self._kind = kind
        return events

    def _find(self, data: bytes, continues: bool) -> int:
        """The offset of an event's text in the output, NOWHERE if the parser has made it itself."""
        read = self._read - self._base
        if continues:
            if self._output.startswith(data, read):
                return self._read
            # the last text was perhaps found too late, in what the parser still held back
            since, last = self._last
            again = self._output.find(last + data, since - self._base)
            if again >= 0:
                return again + len(last) + self._base
        # what the parser gives is not from earlier text alone
        found = self._output.find(data, max(read, self._fed - self._base - len(data) + 1))
        if found < 0:
            found = self._output.rfind(data, read)
        return found + self._base if found >= 0 else NOWHERE

    def _forget(self) -> None:
        """Drop the output before the last text, and tokens that no text can be from."""
        size = self._last[0] - self._base
        del self._output[:size]
        self._base += size
        start = min([self._read, *[start for start, _ in self._found if start != NOWHERE][:1]])
        while self._tokens and self._tokens[0].end < start:
            self._tokens.popleft()

    # --- shown text ---

    def _show(self, data: bytes) -> None:
        """Take the tokens of text that is shown, which is the beginning of what was found."""
        while data:
            start, size = self._found.popleft()
            part, data = data[:size], data[size:]
            if len(part) < size:
                rest = start if start == NOWHERE else start + len(part)
                self._found.appendleft((rest, size - len(part)))
            if start == NOWHERE:
                self._close()
                self._ready.append((part, None))
            else:
                self._show_at(start, part)

    def _show_at(self, start: int, part: bytes) -> None:
        at, end = start, start + len(part)
        while self._tokens and self._tokens[0].start < end:
            token = self._tokens[0]
            if token.end > at or token.start == token.end >= start:
                if token is not self._open:
                    self._close()
                    self._open = token
                if token.start > at:
                    self._ready.append((part[at - start : token.start - start], None))
                    at = token.start
                token.shown += part[at - start : token.end - start]
                at = max(at, min(token.end, end))
            if token.end > end:
                return
            self._tokens.popleft()
        self._close()
        if at < end:
            self._ready.append((part[at - start :], None))

    def _close(self) -> None:
        token, self._open = self._open, None
        if token is not None:
            self._ready.append((token.shown, None if token.listed else token))
            token.shown, token.listed = b"", True

    def _take(self) -> Settled:
        """The whole characters of closed tokens, as one event."""
        try:
            text = b"".join(data for data, _ in self._ready).decode()
        except UnicodeDecodeError:
            return []
        entries = [self._entry(data, token) for data, token in self._ready if token is not None]
        self._ready.clear()
        return [(TextDelta(text), [e for e in entries if e is not None])] if text else []

    def _entry(self, shown: bytes, token: LoggedToken) -> TokenLogprob | None:
        known = token.known
        if known is None:
            return None
        ranked = sorted(known.items(), key=lambda item: -item[1])[: self._most]
        top = []
        for other, value in ranked:
            raw = self._texts.token_bytes(other)
            top.append(TopLogprob(self._name(other, raw), value, list(raw)))
        value = known.get(token.id, -9999.0)
        return TokenLogprob(self._name(token.id, shown), value, list(shown), top)

    def _name(self, token: int, data: bytes) -> str:
        return f"token_id:{token}" if self._by_id else data.decode(errors="replace")
