"""Tools of the Messages API; the client's own ones that the vendor defines by a type alone.

A client runs those itself, as it runs its own, so a model needs their schemas. Tools that only the
vendor's servers run have none.
"""

import re
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.frontend.apis.base import missing
from kvmesh.frontend.conversation import CacheControl, Tool
from kvmesh.retention.hints import CacheMark

OWN_TYPES = (None, "custom", "function")  # the last is OpenAI's, whose form is another
_DATED = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")


class MessagesToolBody(Struct):
    """A tool with its schema, or of one of the vendor's types."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None
    display_width_px: int | None = None
    display_height_px: int | None = None
    cache_control: CacheMark | None = None


def to_tool(body: MessagesToolBody) -> Tool:
    return Tool(
        body.name,
        body.description or "",
        body.input_schema or {},
        strict=bool(body.strict),
        deferred=bool(body.defer_loading),
        cache=cache_control(body.cache_control),
    )


def listed(body: MessagesToolBody, where: str) -> list[Tool]:
    """The tool, but for one that only the vendor's servers run. Raises InvalidRequest."""
    if not body.name:
        raise missing(f"{where}.name")
    if body.input_schema is not None:
        return [to_tool(body)]
    if body.type in OWN_TYPES:
        raise missing(f"{where}.input_schema")
    dated = _DATED.fullmatch(body.type or "")
    if dated is None:
        return []
    description, schema = _KNOWN[dated[1]](body, dated[2])
    tool = to_tool(body)
    return [replace(tool, description=tool.description or description, parameters=schema)]


def cache_control(mark: CacheMark | None) -> CacheControl | None:
    return CacheControl(mark.ttl_s()) if mark is not None else None


_Definition = tuple[str, dict[str, Any]]


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _text(description: str = "") -> dict[str, Any]:
    return {"type": "string", "description": description} if description else {"type": "string"}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_WHOLE = {"type": "integer"}
_PAIR = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}


def _bash(_: MessagesToolBody, date: str) -> _Definition:
    restart = {"type": "boolean", "description": "Restart the shell instead."}
    schema = _object([], command=_text("The command to run."), restart=restart)
    return "Runs a command in a bash shell that keeps its state between calls.", schema


def _text_editor(_: MessagesToolBody, date: str) -> _Definition:
    commands = ["view", "create", "str_replace", "insert"]
    if date < "20250429":
        commands.append("undo_edit")
    latest = date >= "20250728"
    fields = {
        "command": _one_of(*commands),
        "path": _text("The absolute path of the file or folder."),
        "view_range": _PAIR | {"description": "`view`: the first and last line; -1: to the end."},
        "file_text": _text("`create`: the whole text of the file."),
        "old_str": _text("`str_replace`: the text to replace, which must occur once."),
        "new_str": _text("The text in its place" + ("." if latest else ", or that of `insert`.")),
        "insert_line": _WHOLE | {"description": "`insert`: the line to insert behind; 0: at top."},
    }
    if latest:
        fields["insert_text"] = _text("`insert`: the new text.")
    return "Views, creates and edits files.", _object(["command", "path"], **fields)


def _memory(_: MessagesToolBody, date: str) -> _Definition:
    fields = {
        "command": _one_of("view", "create", "str_replace", "insert", "delete", "rename"),
        "path": _text("A path below /memories; not for `rename`."),
        "view_range": _PAIR | {"description": "`view`: the first and last line."},
        "file_text": _text("`create`: the whole text of the file."),
        "old_str": _text("`str_replace`: the text to replace."),
        "new_str": _text("`str_replace`: the text in its place."),
        "insert_line": _WHOLE | {"description": "`insert`: the line to insert behind."},
        "insert_text": _text("`insert`: the new text."),
        "old_path": _text("`rename`: the present path."),
        "new_path": _text("`rename`: the new path."),
    }
    return "Keeps notes in files below /memories between sessions.", _object(["command"], **fields)


def _computer(body: MessagesToolBody, date: str) -> _Definition:
    actions = ["key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"]
    actions += ["middle_click", "double_click", "screenshot", "cursor_position"]
    fields = {
        "coordinate": _PAIR | {"description": "x and y in pixels."},
        "text": _text("The text to type, or the keys to press."),
    }
    if date >= "20250124":
        actions += ["left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"]
        actions.append("triple_click")
        fields |= {
            "start_coordinate": _PAIR | {"description": "Where a drag begins."},
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": _WHOLE,
            "duration": {"type": "number", "description": "Seconds to hold or wait."},
        }
    if date >= "20251124":
        actions.append("zoom")
        fields["region"] = _PAIR | {"minItems": 4, "maxItems": 4}
    size = f"{body.display_width_px or '?'} x {body.display_height_px or '?'}"
    description = f"Uses the mouse, keyboard and screen, of {size} pixels, of a computer."
    return description, _object(["action"], action=_one_of(*actions), **fields)


_KNOWN = {"bash": _bash, "text_editor": _text_editor, "memory": _memory, "computer": _computer}
