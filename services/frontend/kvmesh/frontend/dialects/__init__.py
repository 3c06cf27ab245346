"""Model dialects: chat templates in, tool calls and thinking out."""

from kvmesh.frontend.dialects.errors import DialectError, TemplateError, UnknownParser
from kvmesh.frontend.dialects.output import OutputGrammar, OutputParser, choose_grammar
from kvmesh.frontend.dialects.preview import preview_output
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate

__all__ = [
    "ChatTemplate",
    "DialectError",
    "OutputGrammar",
    "OutputParser",
    "TemplateError",
    "UnknownParser",
    "choose_grammar",
    "preview_output",
]
