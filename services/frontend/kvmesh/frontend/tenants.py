"""Whose names are whose: what tenants call alike is kept apart on the wire."""

from msgspec.structs import replace

from kvmesh.bus.messages import Hints

SEPARATOR = "\x1f"


def scoped(tenant: str, name: str) -> str:
    """A name within a tenant; nobody outside of it can form the same one."""
    return f"{tenant}{SEPARATOR}{name}" if tenant else name.replace(SEPARATOR, "")


def salted(tenant: str | None, own: str) -> str:
    """A key's tenant before what a request adds, which only divides it further.

    What a request of nobody's adds is told from the names of tenants.
    """
    return SEPARATOR.join((tenant or "", own)) if own else tenant or ""


def apart(hints: Hints, tenant: str) -> Hints:
    """The sessions of a request, within its tenant."""
    session, parent = hints.session, hints.parent_session
    if session is None and parent is None:
        return hints
    return replace(
        hints,
        session=None if session is None else scoped(tenant, session),
        parent_session=None if parent is None else scoped(tenant, parent),
    )
