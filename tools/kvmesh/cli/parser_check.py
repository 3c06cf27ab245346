"""Checks the worker's parser settings against the parsers of the frontend."""

from kvmesh.settings import Settings, SettingsError


def check_parsers(settings: Settings) -> None:
    """Raise SettingsError if the worker's settings name an unknown parser."""
    tool, reasoning = settings.worker.tool_parser, settings.worker.reasoning_parser
    if not tool and not reasoning:
        return
    from kvmesh.frontend.dialects import UnknownParser, choose_grammar

    try:
        choose_grammar("", tool_parser=tool or None, reasoning_parser=reasoning or None)
    except UnknownParser as error:
        flag = "tool_parser" if error.name == tool else "reasoning_parser"
        raise SettingsError(f"worker.{flag}", str(error)) from error
