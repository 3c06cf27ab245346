"""The activities of agents between their requests, as live frontends learn of them."""

from collections.abc import Iterator
from math import exp
from random import Random

from kvmesh.bus.messages import ToolEvent
from kvmesh.workload.model import HUMAN, PAUSE, TOOL, Workload

SUBAGENT, END = "Agent", "end"
ESTIMATE_SIGMA = 0.5  # of the logarithm of a harness's estimates, over the true time


class Harness:
    """Names each session's waits between the rounds of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._following = workload.following()
        self._final = workload.final_rounds()

    def agent(self, index: int) -> str:
        """The kind of the agent of a round."""
        return self._workload.sessions[self._workload.rounds[index].session].kind

    def waits_for(self, index: int) -> list[str]:
        """The activity of a round's session after it, as in `Outcome.waits_for`.

        Calls that start child sessions are of the tool "Agent". After a session's last round that
        is not marked as such, a live frontend sees an answer without a tool call: the turn of a
        human. It does not learn that a human has to approve a call.
        """
        following, rounds = self._following[index], self._workload.rounds
        if rounds[index].abort_after is not None:
            return []
        if following is None:
            return [END] if index in self._final else [HUMAN]
        round_ = rounds[following]
        if round_.wait != HUMAN and any(
            rounds[before].session != round_.session for before in round_.after
        ):
            return [TOOL, SUBAGENT]
        return round_.waited_for()

    def reports(self, index: int, now: float, speed: float) -> Iterator[ToolEvent]:
        """The reports of a harness on the tool that a session calls at the end of a round, `now`.

        Waits pass `speed` times faster. The estimates of the time that a tool takes are off by
        ESTIMATE_SIGMA.
        """
        following, rounds = self._following[index], self._workload.rounds
        if following is None or rounds[index].abort_after is not None:
            return
        round_ = rounds[following]
        session = self._workload.sessions[round_.session].name
        if not session or round_.wait in ("", HUMAN, PAUSE) or round_.after != (index,):
            return
        call, tool = f"call-{index}", round_.wait
        started, ended = now + round_.approval_s / speed, now + round_.at_s / speed
        if round_.approval_s:
            yield ToolEvent(
                session=session, event="awaiting_approval", time=now, call=call, tool=tool
            )
        error = exp(Random(f"{session} {index}").gauss(0.0, ESTIMATE_SIGMA))
        yield ToolEvent(
            session=session,
            event="started",
            time=started,
            call=call,
            tool=tool,
            remaining_s=(ended - started) * error,
        )
        yield ToolEvent(session=session, event="ended", time=ended, call=call, tool=tool)
