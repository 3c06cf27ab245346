"""Chat template of one model: renders requests to prompts."""

import datetime
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from kvmesh.frontend.conversation import (
    GAP,
    GenerateRequest,
    Message,
    RenderedPrompt,
    Text,
    Thinking,
    Tool,
)
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.plain_tools import instructions, plain_parser
from kvmesh.frontend.dialects.templates import model_files, sandbox
from kvmesh.frontend.dialects.templates.answer_frames import (
    AnswerFrame,
    MarkedAnswer,
    MarkedText,
)
from kvmesh.frontend.dialects.templates.call_arguments import CallArguments, ShownTools
from kvmesh.frontend.dialects.templates.capabilities import TemplateCapabilities
from kvmesh.frontend.dialects.templates.chat_messages import (
    ends_in_result,
    template_messages,
)
from kvmesh.frontend.dialects.templates.control_tokens import NO_CONTROL, ControlTokens
from kvmesh.frontend.dialects.templates.frame_probe import (
    CONTINUE,
    AnswerFrames,
    probed,
    shows_tools,
)
from kvmesh.frontend.dialects.templates.prompt_json import RepeatedEntry
from kvmesh.frontend.dialects.templates.variants import PROBE_DAY, TemplateVariants
from kvmesh.frontend.dialects.templates.written_calls import (
    WrittenCall,
    after_answer,
    between_results,
    written_calls,
    written_turn,
)
from kvmesh.frontend.dialects.tools import function
from kvmesh.runtime.lru import LruCache

DOCUMENTS = "documents"  # the variable that holds texts of others
ATTEMPTS = 2  # to show answers as they were generated
_OPEN_END = "\ue000kvmesh-continue\ue000"
MEMO_BYTES = 48 << 20
SIZE = 24  # times the JSON of a tool: at most what its entry takes in memory


class _Kept(NamedTuple):
    """An entry with its tool, whose id thus stays its own."""

    tool: Tool
    entry: RepeatedEntry
    guarded: bool


class ToolEntries:
    """The entries of the tools seen last, by their identity, bounded by MEMO_BYTES. Thread-safe."""

    def __init__(self, control: ControlTokens = NO_CONTROL) -> None:
        self._control = control
        self._kept: LruCache[int, _Kept] = LruCache(MEMO_BYTES, _size)
        self._lock = Lock()

    def of(self, tools: list[Tool]) -> list[RepeatedEntry]:
        """An entry for each tool of the prompt's own section; not to be changed."""
        with self._lock:
            return [self._entry(tool).entry for tool in tools if not tool.deferred]

    def entry(self, tool: Tool) -> RepeatedEntry:
        """The entry of any tool; not to be changed."""
        with self._lock:
            return self._entry(tool).entry

    def guarded(self, tools: list[Tool]) -> bool:
        """True if an entry has guards of control tokens."""
        with self._lock:
            return any(self._entry(tool).guarded for tool in tools)

    def _entry(self, tool: Tool) -> _Kept:
        kept = self._kept.get(id(tool))
        if kept is None:
            plain = function(tool)
            shown = self._control.guard_json(plain)
            kept = _Kept(tool, RepeatedEntry(shown), shown is not plain)
            self._kept.put(id(tool), kept)
        return kept


def _size(_: int, kept: _Kept) -> int:
    try:
        return SIZE * len(msgspec.json.encode(kept.entry))
    except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError, RecursionError):
        return MEMO_BYTES + 1  # not kept


class ChatTemplate:
    """Renders requests with the template in a model folder's files.

    The rendered text contains its special tokens, so tokenize it without adding any. `source` is
    the text of all templates, "" if there is none.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        control: Callable[[str], ControlTokens] = lambda _: NO_CONTROL,
    ) -> None:
        """`control` returns the control tokens of a template with this source.

        Raises TemplateError if a file is unreadable or the template does not compile.
        """
        contents = dict(files)
        self._tokens = model_files.special_tokens(contents)
        environment = sandbox.Environment()
        sources = model_files.sources(contents)
        self.source = "\n".join(sources.values())
        self._control = control(self.source)
        self._tools = ToolEntries(self._control)
        self._arguments = CallArguments()
        self._parser = plain_parser(self.source)
        self._templates = {
            name: TemplateVariants(environment, name, source, self._tokens, self._parser)
            for name, source in sources.items()
        }
        self._frames = AnswerFrames(self._render, self._capabilities)

    def render(self, request: GenerateRequest, today: datetime.date) -> str:
        """The prompt's text, as `prompt` returns it."""
        return self.prompt(request, today).text

    def is_plain(self, request: GenerateRequest) -> bool:
        """True if the request's messages are known to have no control tokens."""
        return self._control.absent_from(request.messages, request.memo)

    def prompt(
        self,
        request: GenerateRequest,
        today: datetime.date,
        ends: frozenset[str] = frozenset(),
        plain: bool = False,
    ) -> RenderedPrompt:
        """The prompt; `today` is the template's date. Raises TemplateError.

        The request's `template_args` are variables of the template. With
        `continue_final_message` among them, the model continues the last assistant message.
        Answers that are known as they were generated are shown so where the template shows all of
        an answer; `ends` are the tokens that end one. `plain`: the messages have no control tokens.
        """
        messages = request.messages if plain else self._control.guard(request.messages)
        prompt = self._prompt(request, today, ends, messages)
        guarded = (
            not plain or DOCUMENTS in request.template_args or self._tools.guarded(request.tools)
        )
        # the search of a long text for guards takes time
        return self._control.reveal(prompt) if guarded else prompt

    def _prompt(
        self,
        request: GenerateRequest,
        today: datetime.date,
        ends: frozenset[str],
        messages: list[Message],
    ) -> RenderedPrompt:
        """`prompt` of messages with guards."""
        if not any(message.generated for message in messages):
            return RenderedPrompt(self._render(request, today, messages))
        capabilities = self._capabilities(request)
        unmarked = _hidden_answers(messages, capabilities)
        frames: dict[int, tuple[MarkedAnswer, AnswerFrame]] = {}
        asked = probed(request, ends, today)

        def mark(answer: MarkedAnswer) -> bool:
            if answer.number in unmarked:
                return False
            frame = self._frames.of(asked, answer)
            if frame is None:
                return False
            frames[answer.number] = answer, frame
            return True

        for _ in range(ATTEMPTS):
            frames.clear()
            try:
                text = MarkedText(self._render(request, today, messages, mark))
            except TemplateError:
                break  # its message may quote markers
            failed = {number for number, each in frames.items() if not text.insert(*each)}
            if not failed:
                return text.finish()
            unmarked |= failed  # the template shows them otherwise in this place
        return RenderedPrompt(self._render(request, today, messages))

    def opening(self, request: GenerateRequest, today: datetime.date) -> str | None:
        """The part of the answer's turn that ends the prompt; None if it cannot be told."""
        return self._frames.opening(request, today)

    def _render(
        self,
        request: GenerateRequest,
        today: datetime.date,
        conversation: list[Message],
        mark: Callable[[MarkedAnswer], bool] | None = None,
        count: int = 0,
        invites: bool = True,
    ) -> str:
        """The prompt of a conversation; with `invites`, it ends where an answer begins."""
        visible: list[dict[str, Any]] = [*self._tools.of(request.tools)]
        template = self._select(bool(visible))
        variables = template_variables(request)
        capabilities = template.capabilities(variables)
        continues = bool(request.template_args.get(CONTINUE))
        conversation = _mark_open_end(conversation) if continues else conversation
        shown = ShownTools(self._tools.entry, partial(self._arguments.of, request.cache_salt))
        messages = template_messages(
            conversation,
            request.tools,
            capabilities,
            self._parser,
            shown,
            mark,
            count,
            request.memo,
        )
        if visible and not template.default.tools:
            messages = _with_instructions(
                messages, instructions(visible, self._parser), capabilities
            )
        if DOCUMENTS in variables:
            variables = variables | {DOCUMENTS: self._control.guard_json(variables[DOCUMENTS])}
        variables = {"add_generation_prompt": invites and not continues, **variables}
        listed = visible if template.default.takes_tools else []
        prompt = template.render(messages, listed or None, today, variables, memo=request.memo)
        return _cut_at_open_end(prompt) if continues else prompt

    @cached_property
    def written_calls(self) -> list[WrittenCall]:
        """Turns with a call as the template writes them; none if it shows no tools or calls."""
        if not self._templates or self.plain_parser or self._select(True).default.calls is None:
            return []
        return written_calls(self._render, PROBE_DAY)

    def written_turn(self, calls: list[dict[str, str]], thinking: str = "") -> WrittenCall | None:
        """A turn with these calls of the sample tool; None if the template refuses it."""
        return written_turn(self._render, PROBE_DAY, calls, thinking)

    @property
    def after_answer(self) -> str:
        """The text behind an answer without calls."""
        return after_answer(self._render, PROBE_DAY)

    @property
    def between_results(self) -> str:
        """The text between the results of two calls."""
        return between_results(self._render, PROBE_DAY)

    def drops_thinking(self, request: GenerateRequest) -> bool:
        """True if prompts of later turns lack thinking that the current turn shows."""
        return bool(self._templates) and self._capabilities(request).drops_thinking

    def shows_images_in_results(self, request: GenerateRequest) -> bool:
        """True if a tool result in the prompt may have images."""
        return not self._templates or self._capabilities(request).image_results

    @property
    def plain_parser(self) -> str | None:
        """The parser of the tool instructions' call form; None if the template shows tools."""
        shows = not self._templates or self._select(True).default.tools
        return None if shows else self._parser

    @property
    def fault(self) -> str:
        """The fault of the template, as the end of a sentence about it; else empty."""
        return self._select(True).default.fault if self._templates else ""

    def _capabilities(self, request: GenerateRequest) -> TemplateCapabilities:
        variables = template_variables(request)
        return self._select(shows_tools(request)).capabilities(variables)

    def _select(self, with_tools: bool) -> TemplateVariants:
        if with_tools and model_files.TOOL_USE in self._templates:
            return self._templates[model_files.TOOL_USE]
        if self._templates:
            first = next(iter(self._templates))
            return self._templates.get(model_files.DEFAULT, self._templates[first])
        raise TemplateError("the model has no chat template: it serves plain completions only")


def template_variables(request: GenerateRequest) -> dict[str, Any]:
    """The variables that a request sets; the thinking switch has both names that are in use."""
    switch = request.thinking
    thinking = {} if switch is None else {"enable_thinking": switch, "thinking": switch}
    return thinking | request.template_args


def _hidden_answers(messages: list[Message], capabilities: TemplateCapabilities) -> set[int]:
    """The numbers of the answers with thinking before the user's last message.

    A template that drops thinking does not show them whole.
    """
    if not capabilities.drops_thinking:
        return set()
    # a message with nothing but results is no message of the user
    last = len(messages) - 1
    while last > 0 and (
        messages[last].role == "assistant" or ends_in_result(messages, last + 1, capabilities)
    ):
        last -= 1
    answers = [message for message in messages[:last] if message.generated is not None]
    return {
        number
        for number, message in enumerate(answers)
        if any(isinstance(block, Thinking) for block in message.blocks)
    }


def continued_text(request: GenerateRequest) -> str | None:
    """The text that the model is to continue; None if it begins an answer."""
    if request.prompts or not request.messages or not request.template_args.get(CONTINUE):
        return None
    return "".join(block.text for block in request.messages[-1].blocks if isinstance(block, Text))


def _mark_open_end(messages: list[Message]) -> list[Message]:
    """The conversation with a marker after its last text, where the prompt must end."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        raise TemplateError("only an assistant message can be continued")
    if not last.blocks or not isinstance(last.blocks[-1], Text):
        raise TemplateError("only text can be continued")
    open_end = Text(last.blocks[-1].text + _OPEN_END)
    return [*messages[:-1], Message(role="assistant", blocks=[*last.blocks[:-1], open_end])]


def _cut_at_open_end(prompt: str) -> str:
    end = prompt.rfind(_OPEN_END)
    if end < 0:
        raise TemplateError("the chat template does not show the message to be continued")
    return prompt[:end]


def _with_instructions(
    messages: list[dict[str, Any]], text: str, capabilities: TemplateCapabilities
) -> list[dict[str, Any]]:
    """The messages with tool instructions at their head, for templates without tools."""
    role = "system" if capabilities.system else "user"
    if not messages or messages[0]["role"] != role:
        part = {"type": "text", "text": text}
        return [{"role": role, "content": [part] if capabilities.parts else text}, *messages]
    content = messages[0]["content"]
    text = GAP + text
    listed = isinstance(content, list)
    joined = [*content, {"type": "text", "text": text}] if listed else content + text
    return [messages[0] | {"content": joined}, *messages[1:]]
