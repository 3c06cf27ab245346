"""How models write: chat templates, tool calls, thinking."""

from kvmesh.frontend.dialects.errors import DialectError, TemplateError, UnknownParser
from kvmesh.frontend.dialects.output import OutputGrammar, OutputParser, choose
from kvmesh.frontend.dialects.preview import try_it
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate

__all__ = [
    "ChatTemplate",
    "DialectError",
    "OutputGrammar",
    "OutputParser",
    "TemplateError",
    "UnknownParser",
    "choose",
    "try_it",
]
