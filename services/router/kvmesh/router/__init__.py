"""Routing of prompts to workers: the service, its core, and `KvRouter` for other programs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmesh.router.kv_router import KvRouter

__all__ = ["KvRouter"]


def __getattr__(name: str) -> Any:
    if name == "KvRouter":  # on demand: it imports the service
        from kvmesh.router.kv_router import KvRouter

        return KvRouter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
