"""Sends chunks to frontends; plain tokens that soon follow a message wait for more of them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kvmesh.bus.messages import Tokens

GAP_S = 0.002  # less than the 5 ms of a frontend's frame, so no client waits for it


class OutputSender:
    """Posts with `send` at most one message of plain tokens per frontend and GAP_S.

    The first tokens after a pause leave at once, and so does everything else: the first and the
    last chunk of a request, with whatever waits. Engines with steps longer than GAP_S never wait.
    """

    def __init__(self, send: Callable[[str, Sequence[Tokens]], None]) -> None:
        self._send = send
        self._held: dict[str, dict[str, list[Tokens]]] = {}  # by frontend and request
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def add(self, outputs: Mapping[str, Sequence[Tokens]], now: float) -> None:
        """Send the chunks for each frontend, now or within GAP_S. `now` is the loop's time."""
        waits = now - self._sent_at < GAP_S and all(
            type(chunk) is Tokens for chunks in outputs.values() for chunk in chunks
        )
        if not waits and not self._held:
            self._sent_at = now
            for frontend, chunks in outputs.items():
                self._send(frontend, chunks)
            return
        for frontend, chunks in outputs.items():
            held = self._held.setdefault(frontend, {})
            for chunk in chunks:
                _append(held.setdefault(chunk.request, []), chunk)
        if not waits:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._sent_at + GAP_S, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, {}
        self._sent_at = self._loop.time()
        for frontend, by_request in held.items():
            self._send(frontend, [chunk for chunks in by_request.values() for chunk in chunks])


def _append(chunks: list[Tokens], chunk: Tokens) -> None:
    """Append a chunk of a request, joined with the one before if both are plain."""
    last = chunks[-1] if chunks else None
    if (
        type(last) is Tokens
        and type(chunk) is Tokens
        and last.offset + len(last.tokens) == chunk.offset
    ):
        chunks[-1] = Tokens(last.request, last.offset, last.tokens + chunk.tokens)
    else:
        chunks.append(chunk)
