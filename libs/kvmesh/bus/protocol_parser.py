"""What a NATS server sends, cut into messages as it arrives (client protocol, `MSG`). Pure.

Source: https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from collections.abc import Callable

MSG = b"MSG "
END = b"\r\n"
Known = Callable[[int, bytes, bytes, bytes], bool]


class MessageParser:
    """Takes the messages at the front of what arrives, as long as `known` takes each of them.

    `known` is called with subscription id, subject, reply subject and payload. It returns False
    for a subscription that is another's; that message and all behind it are left to the other.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self._held: list[bytes] = []
        self._missing = 0

    @property
    def waits(self) -> bool:
        """Whether a message has begun whose end is still to come."""
        return bool(self._held)

    def take(self, data: bytes) -> bytes:
        """What is left of `data`, for the other; what only begins a message is kept until it ends.

        Such a message is given whole to whoever it is for, when the rest has arrived.
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
            if not self._known(int(sid), subject, reply[0] if reply else b"", data[body:end]):
                break
            start = end + len(END)
        return data[start:] if start else data
