"""Pages of lists, in the form that both vendors' clients read. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvmesh.frontend.errors import InvalidRequest


class PageQuery(Struct):
    """The page of a list that Anthropic's clients ask for, from or up to an object's id."""

    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None
    after_id: str | None = None
    before_id: str | None = None


def page(
    objects: Sequence[dict[str, Any]],
    limit: int,
    after: str | None = None,
    before: str | None = None,
) -> dict[str, Any]:
    """At most `limit` objects: behind the one with the id `after`, or just ahead of `before`."""
    ids = [each["id"] for each in objects]
    for field, name in (("after", after), ("before_id", before)):
        if name is not None and name not in ids:
            raise InvalidRequest(f"No such object to begin a page at: '{name[:64]}'.", field)
    start, end = 0, len(ids)
    if after is not None:
        start = ids.index(after) + 1
    if before is not None:
        end = ids.index(before)
        start = max(start, end - limit)
        more = start > 0
    else:
        more = start + limit < end
    shown = list(objects[start:end][:limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": more,
    }
