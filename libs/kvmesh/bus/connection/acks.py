"""Streams that do not acknowledge or refuse what is for them, or acknowledge what is not. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from kvmesh.bus.subjects import ROOT

MIN_TIMEOUTS = 3
MIN_S = 4.0
REFUSED_S = 60.0  # for which a refusal counts, unless something is stored meanwhile


class _Ack(Struct):
    stream: str = ""


_ack = Decoder(_Ack)


@dataclass(slots=True)
class _Silence:
    since: float
    timeouts: int = 1


def stream_of(subject: str) -> str:
    """The stream that stores what is published on a subject, directly or for a bucket."""
    first, _, rest = subject.partition(".")
    second, _, rest = rest.partition(".")
    if first == ROOT:
        return f"kvm-{second}-{rest.partition('.')[0]}"
    return f"OBJ_{second}" if first == "$O" else f"KV_{second}"


class Acks:
    """Follows the acknowledgements of one connection by stream; times are of one clock."""

    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}
        self._refusals: dict[str, tuple[float, str]] = {}  # by stream: time and reason
        self._foreign: dict[
            str, tuple[float, str]
        ] = {}  # by stream: time, and subjects of requests

    def arrived(self, stream: str, now: float, refusal: str = "") -> None:
        """The stream has acknowledged a message, or refused it for a reason."""
        if self._silences:
            self._silences.pop(stream, None)
        if refusal:
            self._refusals[stream] = now, refusal
        elif self._refusals:
            self._refusals.pop(stream, None)

    def is_foreign(self, subject: str, data: bytes, now: float) -> bool:
        """True of a reply to a request by which a stream says that it has stored the request.

        Operators may have given a stream more subjects than its own.
        """
        if not subject.startswith(f"{ROOT}."):
            return False
        try:
            stream = _ack.decode(data).stream
        except DecodeError:
            return False
        if stream in ("", stream_of(subject)):
            return False
        self._foreign[stream] = now, f"{'.'.join(subject.split('.')[:3])}.>"
        return True

    def missed(self, stream: str, sent: float) -> None:
        """A message that was sent at `sent` has had no acknowledgement in time."""
        silence = self._silences.get(stream)
        if silence is None:
            self._silences[stream] = _Silence(sent)
        else:
            silence.timeouts += 1

    def reset(self) -> None:
        """Forget everything: the connection is a new one."""
        self._silences.clear()
        self._refusals.clear()
        self._foreign.clear()

    def silent(self, now: float) -> list[str]:
        """The streams without acknowledgements for several messages in a row, sorted."""
        return sorted(
            stream
            for stream, silence in self._silences.items()
            if silence.timeouts >= MIN_TIMEOUTS and now - silence.since >= MIN_S
        )

    def refused(self, now: float) -> Iterator[tuple[str, str]]:
        """The streams that have refused the last message, each with the reason, sorted."""
        return _recent(self._refusals, now)

    def foreign(self, now: float) -> Iterator[tuple[str, str]]:
        """The streams that store requests, too, each with the subjects of these, sorted."""
        return _recent(self._foreign, now)


def _recent(found: dict[str, tuple[float, str]], now: float) -> Iterator[tuple[str, str]]:
    for stream, (at, text) in sorted(found.items()):
        if now - at < REFUSED_S:
            yield stream, text
