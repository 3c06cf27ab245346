"""The permissions that a server states for the user of a connection. Pure."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvmesh.bus.permissions import INBOXES, Permissions, covers


class _Rules(Struct, frozen=True):
    """Patterns; without `allow` all is permitted but what is denied."""

    allow: list[str] | None = None
    deny: list[str] | None = None

    def permit(self, wanted: str) -> bool:
        """True unless all that a pattern matches is refused, or a part that no rule permits."""
        allow = self.allow is None or _covered(self.allow, wanted)
        return allow and not _covered(self.deny or (), wanted)


class _Stated(Struct, frozen=True):
    publish: _Rules = _Rules()
    subscribe: _Rules = _Rules()
    responses: object = None


class _User(Struct):
    permissions: _Stated = _Stated()


class _Reply(Struct):
    data: _User


_decoder = msgspec.json.Decoder(_Reply)


def lacking(reply: bytes, wanted: Permissions) -> Permissions:
    """Those patterns that are not permitted, by a server's reply on USER_INFO.

    Raises msgspec.MsgspecError.
    """
    stated = _decoder.decode(reply).data.permissions
    replies = INBOXES if stated.responses is not None else ()  # of `allow_responses`
    return Permissions(
        tuple(p for p in wanted.publish if not (p in replies or stated.publish.permit(p))),
        tuple(p for p in wanted.subscribe if not stated.subscribe.permit(p)),
    )


def _covered(patterns: Sequence[str], wanted: str) -> bool:
    return any(covers(pattern.partition(" ")[0], wanted) for pattern in patterns)
