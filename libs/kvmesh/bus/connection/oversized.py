"""Protocol lines that wait to be sent, without the messages that exceed a limit. Pure."""

from collections.abc import Iterable

END = b"\r\n"
HEADS = (b"PUB ", b"HPUB ")


def without_oversized(parts: Iterable[bytes], limit: int) -> tuple[list[bytes], int]:
    """The parts without messages whose payload, headers included, exceeds `limit`; their number.

    A part is whole lines and messages, or the head, the payload or the end of a message.
    """
    kept: list[bytes] = []
    dropped, ends = 0, False
    for part in parts:
        if ends and part == END:
            ends = False
        elif len(part) <= limit:
            kept.append(part)
        elif part.startswith(HEADS) and part.endswith(END):
            if _size(part) > limit:
                dropped += 1
            else:
                kept.append(part)
        else:  # a payload: the part before is its head, the one after its end
            kept.pop()
            dropped, ends = dropped + 1, True
    return kept, dropped


def _size(message: bytes) -> int:
    return int(message[: message.find(END)].split()[-1])
