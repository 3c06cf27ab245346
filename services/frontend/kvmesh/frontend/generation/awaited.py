"""Class of what a session waits for after an answer: the tool or the person. Pure.

The class names the tool, as the request declares it, and the kind of its arguments; it never
contains words of the arguments or of the answer.
"""

import re
from typing import NamedTuple

import msgspec

from kvmesh.frontend.conversation import (
    AnswerEvent,
    GenerateRequest,
    Tool,
    ToolCallDelta,
    ToolCallStart,
)
from kvmesh.frontend.dialects.tools import model_name
from kvmesh.frontend.generation.command_classes import (
    BACKGROUND,
    INSTANT,
    OTHER,
    SLOWEST,
    UNKNOWN,
    command_class,
)

MAX_CALLS = 32  # of an answer, whose class is made
MAX_ARGUMENTS = 64 << 10  # characters of all calls together
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_SUBAGENT, _ASKED = SLOWEST + 2, SLOWEST + 3
# tools by the rank of their usual duration, under the names that harnesses give them
_TOOLS = {
    INSTANT: """Edit Glob Grep LS MultiEdit NotebookEdit Read TodoWrite ToolSearch Write apply_diff
        apply_patch edit glob grep list list_dir list_files read read_file replace search_files
        str_replace_based_edit_tool todowrite update_plan view_image write write_file
        write_to_file""",
    _SUBAGENT: "Agent Task new_task subagent task wait wait_agent",
    _ASKED: """AskUserQuestion ExitPlanMode ask_followup_question ask_user ask_user_question
        attempt_completion plan_exit plan_mode_respond question request_user_input""",
}
_RANKS = {name: rank for rank, names in _TOOLS.items() for name in names.split()}


class _Arguments(msgspec.Struct):
    """The arguments of shell tools, by the names that harnesses give them."""

    command: str | list[str] | None = None
    cmd: str | list[str] | None = None
    run_in_background: bool | None = None


class _Awaited(NamedTuple):
    rank: int
    labels: list[str]


class AnswerCalls:
    """The tool calls of one answer, as its events report them; bounded."""

    def __init__(self) -> None:
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        self._room = MAX_ARGUMENTS

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, event: AnswerEvent) -> None:
        """Add an event of a tool call; other events are ignored."""
        if isinstance(event, ToolCallDelta):
            self._room -= len(event.arguments)
            if self._room >= 0:
                self._calls[-1][1].append(event.arguments)
        elif isinstance(event, ToolCallStart):
            if len(self._calls) == MAX_CALLS:
                self._room = 0
            else:
                self._calls.append((event, []))

    def slowest(self, tools: list[Tool]) -> list[str]:
        """The class of the call that probably takes longest; `tools` are those of the request."""
        declared = {model_name(tool.name, tool.namespace) for tool in tools}
        found = [_awaited(start, "".join(parts), declared) for start, parts in self._calls]
        return min(found, key=lambda each: (-each.rank, each.labels)).labels


def waits_for(request: GenerateRequest, finish: str, calls: AnswerCalls) -> list[str]:
    """The class of what the session waits for before its next prompt, from coarse to fine.

    - `["tool", NAME, CLASS]`: the tool call that probably takes longest; a command has the classes
      of `command_class`, one that a harness runs in the background `background`.
    - `["human", NAME]`: a tool that asks the person.
    - `["human"]`, or `["human", "no_tools"]` if the request offers no tools.
    - `["end"]`: nothing; the session or the subagent has ended.
    - `[]`: unknown, after a cancelled, failed or cut answer or to a raw prompt.
    """
    if request.hints.session_final:
        return ["end"]
    if finish not in ("stop", "tool_calls"):
        return []
    if calls:
        return calls.slowest(request.tools)
    if not request.messages:
        return []
    if request.hints.parent_session is not None:
        return ["end"]
    return ["human"] if request.tools else ["human", "no_tools"]


def _awaited(start: ToolCallStart, arguments: str, declared: set[str]) -> _Awaited:
    name = model_name(start.name, start.namespace)
    if name not in declared or not _NAME.fullmatch(name):
        name = OTHER  # the model may have made it up from the prompt
    rank = _RANKS.get(start.name, UNKNOWN)
    if rank == _ASKED:
        return _Awaited(rank, ["human", name])
    given = _Arguments() if start.custom else _decoded(arguments)
    if given.run_in_background:
        return _Awaited(INSTANT, ["tool", name, BACKGROUND])
    command = given.command if given.cmd is None else given.cmd
    if command is not None:
        found = command_class(command if isinstance(command, str) else _line(command))
        return _Awaited(found.rank, ["tool", name, *found.labels])
    return _Awaited(rank, ["tool", name])


def _decoded(arguments: str) -> _Arguments:
    try:
        return msgspec.json.decode(arguments, type=_Arguments)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return _Arguments()


def _line(words: list[str]) -> str:
    """A command line of these words; one with spaces is quoted."""
    return " ".join(f"'{word}'" if " " in word else word for word in words)
