"""kvmesh: a mesh that serves open-weight LLMs to coding agents.

`KvRouter` places prompts from a program of one's own; all else runs as services and commands.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmesh.router.kv_router import KvRouter

__all__ = ["KvRouter"]


def __getattr__(name: str) -> Any:
    if name == "KvRouter":  # on demand: it imports the router and its client of the bus
        from kvmesh.router.kv_router import KvRouter

        return KvRouter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
