"""The activities of agents between their requests, as live frontends learn of them."""

from kvmesh.workload.model import HUMAN, TOOL, Workload

SUBAGENT, END = "Agent", "end"


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
