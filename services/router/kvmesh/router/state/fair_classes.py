"""The fair class of a request, and the tenant that the class is part of."""

from kvmesh.bus.messages import Hints

SEPARATOR = "\x1f"


def fair_class(hints: Hints) -> str:
    """The class of a request: its tenant, subdivided by the caller's fair class.

    Without a tenant, the caller's fair class alone.
    """
    if hints.tenant is None:
        return hints.fair_class or ""
    return f"{hints.tenant}{SEPARATOR}{hints.fair_class}" if hints.fair_class else hints.tenant


def main_class(name: str) -> str:
    """The class without its subdivision."""
    return name.partition(SEPARATOR)[0]
