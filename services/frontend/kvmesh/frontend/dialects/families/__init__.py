"""Grammars of the supported model families, as data: a new family is an entry here.

The formats are those published in each model's card, chat template or tool-calling guide.
"""

from kvmesh.frontend.dialects.families.aliases import AUTO, REASONING_ALIASES, TOOL_ALIASES
from kvmesh.frontend.dialects.families.channels import CHANNELS
from kvmesh.frontend.dialects.families.detection import (
    ARCHITECTURES,
    NAME_SIGNS,
    TEMPLATE_SIGNS,
    by_architecture,
    by_name,
    by_template,
)
from kvmesh.frontend.dialects.families.json_calls import JSON_CALLS, LITERAL_CALLS
from kvmesh.frontend.dialects.families.tagged_calls import TAGGED_CALLS
from kvmesh.frontend.dialects.families.thinking import REASONING_PARSERS
from kvmesh.frontend.dialects.grammar import ToolCallGrammar

TOOL_PARSERS: dict[str, ToolCallGrammar] = {**JSON_CALLS, **TAGGED_CALLS, **LITERAL_CALLS}

__all__ = [
    "ARCHITECTURES",
    "AUTO",
    "CHANNELS",
    "NAME_SIGNS",
    "REASONING_ALIASES",
    "REASONING_PARSERS",
    "TEMPLATE_SIGNS",
    "TOOL_ALIASES",
    "TOOL_PARSERS",
    "by_architecture",
    "by_name",
    "by_template",
]
