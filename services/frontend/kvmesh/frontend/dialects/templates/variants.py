"""One template of a model, and what it can show with the variables that requests set."""

import datetime
from collections.abc import Mapping
from threading import Lock
from typing import Any

import jinja2
from jinja2 import meta

from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates import sandbox
from kvmesh.frontend.dialects.templates.capabilities import TemplateCapabilities, probe
from kvmesh.frontend.turn_memo import TurnMemo
from kvmesh.runtime.lru import LruCache

MAX_VARIANTS = 64
MAX_VALUE = 64  # characters of a variable that may be a switch
# Switches of templates that can show earlier thinking: dropping it would change the prompt's prefix
# with every user message. Callers may override them.
_KEEP_THINKING = {"preserve_thinking": True, "clear_thinking": False}
PROBE_DAY = datetime.date(2026, 1, 1)
# A conversation decides these, or callers cannot replace them.
_NO_SWITCHES = {"messages", "tools", "strftime_now", "raise_exception", "add_generation_prompt"}
Switches = tuple[tuple[str, bool | float | str | None], ...]


class TemplateVariants:
    """A compiled template; `default` are its capabilities while requests set no variable.

    Thread-safe. Raises TemplateError if it does not compile.
    """

    def __init__(
        self,
        environment: sandbox.Environment,
        name: str,
        source: str,
        tokens: Mapping[str, str],
        parser: str,
    ) -> None:
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template {name!r}, line {error.lineno}: {error}") from error
        # every rendering copies it; a dict copies faster
        self._template.globals = dict(self._template.globals)
        self._switches = names - _NO_SWITCHES
        self._source = source
        self._tokens = tokens
        self._parser = parser
        self._known: LruCache[Switches, TemplateCapabilities] = LruCache(MAX_VARIANTS)
        self._lock = Lock()  # long prompts are rendered in threads
        self.default = self._probe(())

    def capabilities(self, variables: Mapping[str, Any]) -> TemplateCapabilities:
        """The capabilities with these variables; probed where their switches are new."""
        switches = self._set(variables) if variables else ()
        if not switches:
            return self.default
        known = self._known.peek(switches)
        if known is None:
            known = self._probe(switches)
            with self._lock:
                self._known.put(switches, known)
        return known

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        today: datetime.date,
        variables: Mapping[str, Any],
        steps: int = sandbox.MAX_STEPS,
        memo: TurnMemo | None = None,
    ) -> str:
        """The text of a conversation; `today` is the template's date. Raises TemplateError."""
        fixed = {
            "messages": messages,
            "tools": tools,
            "strftime_now": sandbox.strftime(today),
            "raise_exception": sandbox.raise_exception,
        }
        given = {**self._tokens, **_KEEP_THINKING, **variables, **fixed}
        return sandbox.render(self._template, given, steps, memo)

    def _set(self, variables: Mapping[str, Any]) -> Switches:
        """The variables that may change what the template shows, in one order."""
        return tuple(
            (name, variables[name])
            for name in sorted(self._switches & variables.keys())
            if _is_switch(variables[name])
        )

    def _probe(self, switches: Switches) -> TemplateCapabilities:
        variables = {"add_generation_prompt": True, **dict(switches)}

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            return self.render(messages, tools, PROBE_DAY, variables, sandbox.PROBE_STEPS)

        return probe(render, self._source, self._parser)


def _is_switch(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_VALUE
    return value is None or isinstance(value, bool | int | float)
