"""The window of active agents: the share of memory that their contexts may fill.

After Concur (arXiv 2601.22705), which sizes the number of concurrent agents as TCP sizes its
window, by cache signals. The signal here: prompt tokens that an agent which kept its place had
computed before and found evicted.
"""

from math import exp, inf

FADE_S = 60.0
EVIDENCE = 5.0  # faded turns, below which the window does not change
THRASHING = 0.10  # share of lost tokens at which an open window shuts, if computing them takes
WORTH = 0.1  # of the ranks' time
HIGH, LOW = 0.03, 0.005  # shares of lost tokens, between which the window stays
FIRST = 0.95
STEP = 0.0025
GAIN = 2.0
LEAST = 0.88
WIDEST = 1.5  # beyond, the window is open
REVIEW_S = 5.0
USELESS = 0.5  # share of lost tokens at which the least window is given up
PATIENCE = 12  # reviews in a row
BACK_OFF_S = 300.0
LONGEST_S = 3600.0


class AgentWindow:
    """`share` of a rank's memory for the contexts of active agents; infinite while it is open.

    Additive increase, multiplicative decrease. If agents lose their contexts even in the least
    window, their rest does not help: the window opens and stays open for BACK_OFF_S, then for twice
    as long each time.
    """

    def __init__(self) -> None:
        self.share = inf
        self._prompt = self._lost = self._turns = 0.0
        self._saved = self._kept = 0.0
        self._faded = self._reviewed = -inf
        self._useless = 0
        self._back_off_s = BACK_OFF_S
        self._shut_until = -inf

    @property
    def open(self) -> bool:
        return self.share == inf

    @property
    def lost_share(self) -> float:
        """Share of recent prompts' tokens that agents had computed before and lost."""
        return self._lost / self._prompt if self._prompt else 0.0

    @property
    def pays(self) -> bool:
        """True if keeping contexts between turns saves clearly more than it costs.

        A context that is kept for at most `break_even_s` costs its share of the memory for the
        pause; one that is then used saves its computation, which is its share of the memory times
        `break_even_s`.
        """
        return self._saved > GAIN * self._kept

    def observe_pause(self, tokens: int, pause_s: float, break_even_s: float, now: float) -> None:
        """Count the pause before any turn that continues another."""
        self._fade(now)
        self._saved += tokens * break_even_s * (pause_s <= break_even_s)
        self._kept += tokens * min(pause_s, break_even_s)

    def observe(self, prompt_tokens: int, lost_tokens: int, now: float) -> None:
        """Count a turn of an agent that kept its place since the turn before."""
        self._fade(now)
        self._prompt += max(prompt_tokens, 1)
        self._lost += min(max(lost_tokens, 0), prompt_tokens)
        self._turns += 1.0

    def observe_lost(self, tokens: int, now: float) -> None:
        """Count tokens of an observed turn that were evicted before its engine started it."""
        self._fade(now)
        self._lost = min(self._lost + tokens, self._prompt)

    def _fade(self, now: float) -> None:
        if now <= self._faded:
            return
        kept = exp((self._faded - now) / FADE_S)
        self._prompt *= kept
        self._lost *= kept
        self._turns *= kept
        self._saved *= kept
        self._kept *= kept
        self._faded = now

    def review(self, resting: bool, rate: float, now: float) -> None:
        """Change the window by what was observed, at most every REVIEW_S.

        It widens only while agents are resting: else it does not matter. All ranks together compute
        `rate` prompt tokens per second. Rests gain at most the time in which lost tokens are
        computed again, so the window shuts only if that is a good part of the ranks' time.
        """
        if now - self._reviewed < REVIEW_S:
            return
        self._reviewed = now
        if self._turns * exp((self._faded - now) / FADE_S) < EVIDENCE:
            return
        lost = self.lost_share
        if self.open and self._lost < WORTH * FADE_S * rate:
            return
        if lost > (THRASHING if self.open else HIGH):
            self._narrow(lost, now)
            return
        self._useless = 0
        if lost < LOW and resting:
            self.share = self.share + STEP if self.share < WIDEST else inf

    def _narrow(self, lost: float, now: float) -> None:
        if now < self._shut_until:
            return
        if self.share > LEAST:
            self.share = FIRST if self.open else max(0.95 * self.share, LEAST)
            return
        self._useless = self._useless + 1 if lost > USELESS else 0
        if self._useless >= PATIENCE:
            self.share, self._useless = inf, 0
            self._shut_until = now + self._back_off_s
            self._back_off_s = min(2.0 * self._back_off_s, LONGEST_S)
