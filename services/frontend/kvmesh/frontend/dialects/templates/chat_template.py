"""The chat template of one model: from a request to the text of its prompt."""

import datetime
from collections.abc import Mapping
from typing import Any

import jinja2

from kvmesh.frontend.conversation import GenerateRequest, Message, Text
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.plain_tools import instructions, plain_parser
from kvmesh.frontend.dialects.templates import model_files, sandbox
from kvmesh.frontend.dialects.templates.capabilities import TemplateCapabilities, probe
from kvmesh.frontend.dialects.templates.chat_messages import normalise
from kvmesh.frontend.dialects.tools import function

CONTINUE = "continue_final_message"
_CUT = "\ue000kvmesh-continue\ue000"
# Templates that can keep or drop earlier thinking keep it: dropping it would change the prompt's
# beginning with every user message. Callers may say otherwise.
_KEEP_THINKING = {"preserve_thinking": True, "clear_thinking": False}
_PROBE_DAY = datetime.date(2026, 1, 1)


class ChatTemplate:
    """Renders requests with the template found in a model folder's files.

    Special tokens are part of the text: tokenize it without adding any. `source` is the text of
    all its templates, "" if there is none.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises TemplateError if a file is unreadable or the template does not compile."""
        held = dict(files)
        self._tokens = model_files.special_tokens(held)
        environment = sandbox.Environment()
        self._templates: dict[str, tuple[jinja2.Template, TemplateCapabilities]] = {}
        sources = model_files.sources(held)
        self.source = "\n".join(sources.values())
        for name, source in sources.items():
            template = _compiled(environment, name, source)
            self._templates[name] = (template, probe(self._prober(template), source))

    def render(self, request: GenerateRequest, today: datetime.date) -> str:
        """The prompt. `today` is what the template takes for the date; raises TemplateError.

        `template_args` reach the template as variables. With `continue_final_message` among
        them the last message, the assistant's, is left open for the model to go on with.
        """
        visible = [function(tool) for tool in request.tools if not tool.deferred]
        template, habits = self._choose(bool(visible))
        carry_on = bool(request.template_args.get(CONTINUE))
        conversation = _left_open(request.messages) if carry_on else request.messages
        messages = normalise(conversation, request.tools, habits)
        if visible and self.plain_parser:
            messages = _told(messages, instructions(visible, self.plain_parser), habits)
        prompt = sandbox.render(
            template,
            {
                **self._tokens,
                **_KEEP_THINKING,
                **_thinking(request),
                "add_generation_prompt": not carry_on,
                **request.template_args,
                **_core(messages, visible or None, today),
            },
        )
        return _cut(prompt) if carry_on else prompt

    @property
    def drops_thinking(self) -> bool:
        """Whether thinking that is shown in its own turn is missing from later prompts."""
        return any(habits.drops_thinking for _, habits in self._templates.values())

    @property
    def plain_parser(self) -> str | None:
        """The tool-call parser whose form tools are described in; None if the template can."""
        if not self._templates or (habits := self._choose(True)[1]).tools:
            return None
        return plain_parser(self.source, habits.calls is not None)

    def _choose(self, with_tools: bool) -> tuple[jinja2.Template, TemplateCapabilities]:
        if with_tools and model_files.TOOL_USE in self._templates:
            return self._templates[model_files.TOOL_USE]
        if self._templates:
            first = next(iter(self._templates))
            return self._templates.get(model_files.DEFAULT, self._templates[first])
        raise TemplateError("this model has no chat template: it serves plain completions only")

    def _prober(self, template: jinja2.Template) -> Any:
        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            variables = {**self._tokens, **_KEEP_THINKING, "add_generation_prompt": True}
            return sandbox.render(
                template, variables | _core(messages, tools, _PROBE_DAY), sandbox.PROBE_STEPS
            )

        return render


def _compiled(environment: sandbox.Environment, name: str, source: str) -> jinja2.Template:
    try:
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template {name!r}, line {error.lineno}: {error}") from error
    template.globals = dict(template.globals)  # copied for every rendering, and slowly as it was
    return template


def _core(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, today: datetime.date
) -> dict[str, Any]:
    """The variables that no caller may replace."""
    return {
        "messages": messages,
        "tools": tools,
        "strftime_now": sandbox.strftime(today),
        "raise_exception": sandbox.raise_exception,
    }


def _thinking(request: GenerateRequest) -> dict[str, bool]:
    """The two names that templates give to the switch."""
    if request.thinking is None:
        return {}
    return {"enable_thinking": request.thinking, "thinking": request.thinking}


def _left_open(messages: list[Message]) -> list[Message]:
    """The conversation with a mark behind its last text, where the prompt is to be cut."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        raise TemplateError("only a message of the assistant can be continued")
    if not last.blocks or not isinstance(last.blocks[-1], Text):
        raise TemplateError("only text can be continued")
    open_end = Text(last.blocks[-1].text + _CUT)
    return [*messages[:-1], Message(role="assistant", blocks=[*last.blocks[:-1], open_end])]


def _cut(prompt: str) -> str:
    end = prompt.rfind(_CUT)
    if end < 0:
        raise TemplateError("the chat template does not show the message to be continued")
    return prompt[:end]


def _told(
    messages: list[dict[str, Any]], text: str, habits: TemplateCapabilities
) -> list[dict[str, Any]]:
    """The conversation with the tools described at its head, for templates without tools."""
    role = "system" if habits.system else "user"
    part = {"type": "text", "text": text}
    if not messages or messages[0]["role"] != role:
        return [{"role": role, "content": [part] if habits.parts else text}, *messages]
    content = messages[0]["content"]
    joined = [*content, part] if isinstance(content, list) else f"{content}\n\n{text}"
    return [messages[0] | {"content": joined}, *messages[1:]]
