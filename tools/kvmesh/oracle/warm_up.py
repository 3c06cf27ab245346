"""Requests that fill the caches of a simulated fleet before the recorded ones arrive.

A window begins with conversations whose prompts are cached already. On empty caches each of them
would compute its whole prompt once more, which no worker of the mesh has done.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from kvmesh.hashing import HASH_BYTES
from kvmesh.workload.capture import CapturedRound, assemble
from kvmesh.workload.model import Round, Session, Workload

MOST_ROUNDS = 2000


def cached_before(captured: Sequence[CapturedRound]) -> list[tuple[int, int]]:
    """The requests whose cached tokens the window does not explain, with their number of tokens.

    `captured` are sorted by arrival. More than half of the tokens that a worker found cached are in
    no prompt before it: a chat's next prompt has the last answer cached too, which no prompt had.
    """
    seen: set[bytes] = set()
    found: list[tuple[int, int]] = []
    for number, each in enumerate(captured):
        decision = each.decision
        size, hashes = decision.block_size, decision.sequence_hashes
        blocks = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        cached = min(each.outcome.cached_tokens // size, len(blocks)) if size else 0
        if known < cached / 2 and len(found) < MOST_ROUNDS:
            found.append((number, cached * size))
            seen.update(blocks[:cached])
        seen.update(blocks)
    return found


class WarmedRequests:
    """The workload of requests sorted by arrival, with a warm-up before them.

    Round n is that of request n; rounds of the warm-up follow them in the list and precede them in
    time, those whose blocks are needed first last. Raises CaptureError.
    """

    def __init__(self, captured: Sequence[CapturedRound]) -> None:
        self._workload = assemble(list(captured))
        before = cached_before(captured)
        self._tokens = sum(tokens for _, tokens in before)
        self._sessions = list(self._workload.sessions)
        self._warm_up: list[Round] = []
        for number, tokens in reversed(before):
            branch = self._workload.rounds[number].branch
            self._warm_up.append(
                Round(
                    session=len(self._sessions),
                    branch=branch,
                    output_branch=self._workload.tree.fork(branch, tokens),
                    input_tokens=tokens,
                    output_tokens=1,
                )
            )
            self._sessions.append(Session(name=f"warm-up-{number}"))

    def workload(self, speed: float, token_s: float, workers: int) -> tuple[Workload, float]:
        """The workload for a fleet, and the seconds of its warm-up.

        `workers` compute a prompt token in `token_s` each; times will be divided by `speed`.
        """
        count = len(self._warm_up)
        seconds = 2 * self._tokens * token_s / max(workers, 1)
        rounds = [
            each if each.after else replace(each, at_s=each.at_s + seconds * speed)
            for each in self._workload.rounds
        ]
        rounds += [
            replace(each, at_s=place * seconds * speed / count)
            for place, each in enumerate(self._warm_up)
        ]
        warmed = Workload(
            tree=self._workload.tree,
            sessions=self._sessions,
            rounds=rounds,
            block_size=self._workload.block_size,
        )
        return warmed, seconds
