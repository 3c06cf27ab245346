"""Token times and KV transfers of a worker, for its weights process. Pure."""

from collections.abc import Callable

from kvmesh.bus.messages import Work
from kvmesh.weights.frames import ServingReport
from kvmesh.worker.engine import OutputDelta

MIN_GAPS = 16  # in a report, unless it has waited for LONGEST_S
LONGEST_S = 1.0
SLOW = 0.9  # the quantile of the times that is reported
LENT_S = 0.5  # for which a prefill's KV is taken to be read by a decode worker
MOST = 4096  # requests and times that are remembered


class ServingSample:
    """Collects until `take`; `on_transfer` is called when transfers of KV begin."""

    def __init__(self, on_transfer: Callable[[], None]) -> None:
        self._on_transfer = on_transfer
        self._last: dict[str, float] = {}
        self._gaps: list[float] = []
        self._fetching: set[str] = set()
        self._lent_until = 0.0
        self._began = 0.0

    def submitted(self, work: Work) -> None:
        """The engine has a request; with a handoff its KV is fetched until its first token."""
        if work.handoff is not None and len(self._fetching) < MOST:
            self._fetching.add(work.request)
            if len(self._fetching) == 1:
                self._on_transfer()

    def output(self, deltas: list[OutputDelta], now: float) -> None:
        """Take in what the engine has produced."""
        for delta in deltas:
            if delta.handoff is not None:
                self._lent_until = now + LENT_S
                self._on_transfer()
            if not delta.tokens and delta.finish is None:
                continue
            self._fetching.discard(delta.request)
            before = self._last.pop(delta.request, None)
            if delta.finish is None and len(self._last) < MOST:
                self._last[delta.request] = now
            if before is not None and delta.tokens and len(self._gaps) < MOST:
                self._gaps.append(now - before)

    def take(self, now: float) -> ServingReport | None:
        """The report of the time since the last one; None while there is little to tell."""
        transfers = bool(self._fetching) or now < self._lent_until
        gaps = sorted(self._gaps)
        if len(gaps) < MIN_GAPS and now - self._began < LONGEST_S:
            return ServingReport(transfers=True) if transfers else None
        self._began = now
        self._gaps.clear()
        if not gaps and not transfers:
            return None
        slow_s = gaps[int(SLOW * (len(gaps) - 1))] if gaps else 0.0
        return ServingReport(len(gaps), slow_s, transfers)
