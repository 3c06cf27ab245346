"""Prompts that engines compute now, requests that wait for them, and how long prefill takes.

Each follows from the active-sequence events of all routers, so replicas know the same.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvmesh.bus.messages import SeqAdd, prefill_part
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.state.prefix_tree import common_prefix

MAX_PREFILLS = 16_384
MAX_COMPARED = 64  # prompts of one rank, the latest
UNKNOWN_TOKEN_S = 1 / 5000  # for a token, until some rank's prefill was measured
MEASURED_TOKENS = 512  # in fewer, the engine's overhead outweighs the prefill
MOST_SLOWER = 4.0  # times the time known before, as which a sample counts: an engine may stall
ON_TIME = 0.95  # of the expected time: those that wait for as long have no more of it
_SMOOTHING = 0.2


class Prefill(NamedTuple):
    """A request whose prompt is being computed on the rank in `slot`.

    The first `overlap` blocks of `hashes` were cached there. `work` are the tokens that the rank
    computes until the first token: its uncached ones, and those of the requests before it. Of two
    requests in one engine, the one with the higher `priority` is computed first.
    """

    request: str
    slot: int
    hashes: bytes
    overlap: int
    priority: int
    placed: float
    work: float

    @property
    def uncached(self) -> int:
        """Blocks that the rank computes for this prompt."""
        return max(len(self.hashes) // HASH_BYTES - self.overlap, 0)

    def shared(self, hashes: bytes) -> int:
        """Leading blocks of another prompt that this request computes or has found cached."""
        if self.hashes[:HASH_BYTES] != hashes[:HASH_BYTES]:
            return 0
        return common_prefix(self.hashes, hashes, 0) // HASH_BYTES


class WaitForPrefill(NamedTuple):
    """A request that waits for the prefill of `leader`, since `time` by the stream's clock.

    It counts `tokens` on the rank in `slot`, whose engine does not have it. `heard` is on the
    router's clock.
    """

    leader: str
    time: float
    slot: int | None
    tokens: float
    heard: float


class RunningPrefills:
    """Prefills by slot, the requests that wait for each, and the seconds for a token of a rank.

    A prefill of which nothing is heard is forgotten `patience` seconds after its placement, as are
    the oldest beyond MAX_PREFILLS.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._running: OrderedDict[str, Prefill] = OrderedDict()
        self._of_slot: dict[int, dict[str, Prefill]] = {}
        self._waits_for: OrderedDict[str, WaitForPrefill] = OrderedDict()
        self._followers: dict[str, dict[str, float]] = {}  # of a leader: request, time
        self._waiting_tokens: dict[int, float] = {}
        self._token_s: dict[int, float] = {}
        self._any_token_s: float | None = None

    def __contains__(self, request: str) -> bool:
        return request in self._running

    def count(self, slot: int) -> int:
        """The number of prompts that a rank computes or has before it."""
        return len(self._of_slot.get(slot, ()))

    def waits(self, request: str) -> bool:
        """True for a request that waits for the prefill of another one."""
        return request in self._waits_for

    def wait(self, event: SeqAdd, slot: int | None, tokens: float, now: float) -> None:
        """A request waits for the prefill of another one, `event.waits_for`.

        It counts `tokens` to compute on the rank in `slot`.
        """
        self.end_wait(event.request)
        self._waits_for[event.request] = WaitForPrefill(
            event.waits_for, event.time, slot, tokens, now
        )
        self._followers.setdefault(event.waits_for, {})[event.request] = event.time
        if slot is not None:
            self._waiting_tokens[slot] = self.waiting_tokens(slot) + tokens
        if len(self._waits_for) > MAX_PREFILLS:
            self.end_wait(next(iter(self._waits_for)))

    def end_wait(self, request: str) -> bool:
        """A request waits no longer; False if it did not wait."""
        wait = self._waits_for.pop(request, None)
        if wait is None:
            return False
        followers = self._followers[wait.leader]
        del followers[request]
        if not followers:
            del self._followers[wait.leader]
        if wait.slot in self._waiting_tokens:
            left = self._waiting_tokens.pop(wait.slot) - wait.tokens
            if left > 0:
                self._waiting_tokens[wait.slot] = left
        return True

    def waiting_tokens(self, slot: int) -> float:
        """Tokens that count on a rank of requests that wait for a prefill, in any router."""
        return self._waiting_tokens.get(slot, 0.0)

    def start(self, event: SeqAdd, slot: int, work: float, now: float) -> None:
        """A rank got the prompt of a request; `work` is as in `Prefill`."""
        self.drop(event.request)
        prefill = Prefill(
            event.request, slot, event.sequence_hashes, event.overlap, event.priority, now, work
        )
        self._running[event.request] = prefill
        self._of_slot.setdefault(slot, {})[event.request] = prefill
        if len(self._running) > MAX_PREFILLS:
            self.drop(next(iter(self._running)))

    def computed(self, request: str, now: float) -> None:
        """A prompt has been computed: learn how long that takes."""
        prefill = self._running.get(request)
        if prefill is None:
            return
        self.drop(request)
        if prefill.work < MEASURED_TOKENS or now <= prefill.placed:
            return
        sample = (now - prefill.placed) / prefill.work
        before = self._token_s.get(prefill.slot, self._any_token_s)
        if before is None:
            before = sample
        sample = min(sample, MOST_SLOWER * before)
        before = self._token_s.get(prefill.slot, sample)
        self._token_s[prefill.slot] = before + _SMOOTHING * (sample - before)
        if self._any_token_s is None:
            self._any_token_s = sample
        self._any_token_s += _SMOOTHING * (sample - self._any_token_s)

    def drop(self, request: str) -> None:
        """A prefill has ended, or is given up; unknown ones change nothing."""
        prefill = self._running.pop(request, None)
        if prefill is None:
            return
        of_slot = self._of_slot[prefill.slot]
        del of_slot[request]
        if not of_slot:
            del self._of_slot[prefill.slot]

    def find(
        self, slot: int, hashes: bytes, priority: int, request: str
    ) -> tuple[Prefill, int] | None:
        """The prefill on a rank that computes most leading blocks of a prompt, and their number.

        None if no engine computes any before a request with this priority. The prompt is that of
        `request`, which may be there itself if it is sent again.
        """
        of_slot = self._of_slot.get(slot)
        if of_slot is None or not hashes:
            return None
        best, most, own = None, 0, (request, prefill_part(request))
        for prefill in list(of_slot.values())[-MAX_COMPARED:]:
            if prefill.priority >= priority and prefill.request not in own:
                blocks = prefill.shared(hashes) - prefill.overlap
                if blocks > most:
                    best, most = prefill, blocks
        return None if best is None else (best, most)

    def dominates(self, prefill: Prefill) -> bool:
        """True if a rank has no more to compute of all other prompts than of this one."""
        left = 2 * prefill.uncached
        for other in self._of_slot.get(prefill.slot, {}).values():
            left -= other.uncached
            if left < 0:
                return False
        return True

    def is_late(self, request: str, blocks: int, now: float) -> bool:
        """True if a prompt takes too long for one that waits for so many of its blocks.

        That is one that waits for most of them, or any later than they were expected.
        """
        prefill = self._running.get(request)
        if prefill is None:
            return False
        most = 2 * blocks >= len(prefill.hashes) // HASH_BYTES - prefill.overlap
        expected = ON_TIME * prefill.work * self.token_s(prefill.slot)
        return most or now - prefill.placed >= expected

    def successor(self, request: str) -> str | None:
        """Of the requests that wait for this one, the first: it computes if this one does not."""
        followers = self._followers.get(request)
        return min((time, name) for name, time in followers.items())[1] if followers else None

    def token_s(self, slot: int) -> float:
        """Seconds that a rank takes for a token of a prompt, measured under its load."""
        known = self._token_s.get(slot, self._any_token_s)
        return UNKNOWN_TOKEN_S if known is None else known

    def forget(self, slots: list[int]) -> None:
        """Drop the prefills on `slots`, whose worker is gone, and what was measured there."""
        for slot in slots:
            for request in list(self._of_slot.get(slot, ())):
                self.drop(request)
            self._token_s.pop(slot, None)
            self._waiting_tokens.pop(slot, None)

    def expire(self, now: float) -> None:
        """Forget the prefills and waits of which nothing was heard for too long."""
        oldest = now - self._patience
        while self._running and next(iter(self._running.values())).placed < oldest:
            self.drop(next(iter(self._running)))
        while self._waits_for and next(iter(self._waits_for.values())).heard < oldest:
            self.end_wait(next(iter(self._waits_for)))
