"""The input of stored responses as it is listed: items with ids and types, in pages. Pure."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from kvmesh.frontend.apis.base import StoredTurn, json_encode
from kvmesh.frontend.apis.responses.body import Included
from kvmesh.frontend.apis.responses.items import RESPONSE_PREFIX
from kvmesh.frontend.apis.responses.references import head_of
from kvmesh.frontend.errors import InvalidRequest

MAX_LISTED = 100
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "compaction": "cmp",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "cto",
}


class StoredQuery(Struct, kw_only=True):
    """Query of what is stored. `include` has no effect: the answer has all that is stored."""

    include: list[Included] | None = None


class ItemsQuery(StoredQuery):
    """Query of a list of items, of which `after` is the one before the page."""

    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    after: str | None = None


def input_item(turn: StoredTurn, place: int) -> Raw:
    """The item of a turn's input at this place, in the form in which it is listed.

    Without an id of its own it has one that names the response and the place.
    """
    item: dict[str, Any] = msgspec.json.decode(turn.input[place])
    if head_of(turn.input[place]).is_reference:
        return turn.input[place]
    kind = item.get("type") or "message"
    name = f"{PREFIXES.get(kind, 'itm')}_{turn.id.removeprefix(RESPONSE_PREFIX)}i{place:02x}"
    own = item.get("id")
    listed = {**item, "id": own if own and isinstance(own, str) else name, "type": kind}
    if kind == "message":
        listed["content"] = _parts(item.get("content"), item.get("role"))
    if kind not in ("reasoning", "compaction"):
        listed["status"] = item.get("status") or "completed"
    return Raw(json_encode(listed))


def referenced_items(turn: StoredTurn, places: Iterable[int]) -> list[Raw]:
    """The output of a turn, and the items of its input at these places, as far as there are any."""
    return [*turn.output, *(input_item(turn, n) for n in places if n < len(turn.input))]


def input_of(turns: Sequence[StoredTurn]) -> list[Raw]:
    """The input of the last of these turns: all items before its output."""
    found: list[Raw] = []
    for turn in turns:
        found += [input_item(turn, place) for place in range(len(turn.input))]
        found += turn.output if turn is not turns[-1] else []
    return found


def said_by_user(items: Iterable[Raw]) -> list[Raw]:
    """The user's messages of a conversation."""
    return [item for item in items if head_of(item).role == "user"]


def _parts(content: Any, role: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    parts: list[dict[str, Any]] = content or []
    return [{"annotations": [], **p} if p.get("type") == "output_text" else p for p in parts]


def item_list(items: Sequence[Raw], query: ItemsQuery) -> dict[str, Any]:
    """A page of items, which are given in the order of the prompt.

    Raises InvalidRequest if `after` is none of them.
    """
    ordered = list(items if query.order == "asc" else items[::-1])
    names = [head_of(item).id for item in ordered]
    begin = 0
    if query.after is not None:
        if query.after not in names:
            raise InvalidRequest(f"`after`: no item has the id '{query.after}'.", "after")
        begin = names.index(query.after) + 1
    end = begin + query.limit
    shown = names[begin:end]
    return {
        "object": "list",
        "data": ordered[begin:end],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": end < len(ordered),
    }
