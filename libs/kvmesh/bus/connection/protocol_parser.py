"""Parser of the NATS client protocol's `MSG`, fed with bytes as they arrive. Pure.

Source: https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from collections.abc import Callable

MSG = b"MSG "
END = b"\r\n"
Handler = Callable[[int, bytes, bytes, bytes], bool]


class MessageParser:
    """Hands leading messages to `handler` until it declines one.

    `handler` gets subscription id, subject, reply subject and payload. It returns False for a
    subscription of nats-py's own parser, which then gets that message and everything after it.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._held: list[bytes] = []
        self._missing = 0

    @property
    def has_partial(self) -> bool:
        """True while an incomplete message is buffered."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Parse `data`; return the rest, for nats-py's parser.

        An incomplete message is buffered until its end arrives, then delivered or returned whole.
        """
        if self._held:
            self._held.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return b""
            data, self._held = b"".join(self._held), []
        start = 0
        while data.startswith(MSG, start) and (line := data.find(END, start)) > 0:
            subject, sid, *reply, size = data[start + len(MSG) : line].split()
            body = line + len(END)
            end = body + int(size)
            self._missing = end + len(END) - len(data)
            if self._missing > 0:
                self._held.append(data[start:])
                return b""
            if not self._handler(int(sid), subject, reply[0] if reply else b"", data[body:end]):
                break
            start = end + len(END)
        return data[start:] if start else data
