"""Tenant namespaces: tags and salts that separate tenants' caches, sessions and stored responses.

People choose tenants' names, and callers choose parts of them. Messages carry a tag instead: a
128-bit keyed hash of the name. Without the mesh's secret, a tag can be neither predicted nor
collided with.
"""

import re
from functools import lru_cache
from hashlib import blake2b

from msgspec.structs import replace

from kvmesh.bus.messages import Hints
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.hashing import salt

SEPARATOR = "\x1f"
TAG_BYTES = 16
KEY_BYTES = 32
MAX_NAME = 128
_salt = lru_cache(maxsize=1024)(salt)  # requests of few tenants and models follow each other
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME}}}")


def scoped(tenant: str, name: str) -> str:
    """A name within the tenant of this tag; no other tenant can form the same one."""
    name = name.replace(SEPARATOR, "")
    return f"{tenant}{SEPARATOR}{name}" if tenant else name


def own_name(name: str) -> str:
    """The name without its tenant's tag, as the caller gave it."""
    return name.rpartition(SEPARATOR)[2]


def inferred(tenant: str, name: str) -> str:
    """A name within a tenant that no caller can form, not even a caller of that tenant."""
    return f"{tenant}{SEPARATOR}{SEPARATOR}{name}"


def is_inferred(name: str) -> bool:
    """True if no caller has given this name."""
    return SEPARATOR * 2 in name


def certain_conversation(hints: Hints) -> int:
    """The key of a request's conversation for engines, which drop what it has left.

    0 where its session has no name of the caller: clients that work on one task at the same time
    then share the key.
    """
    is_named = hints.session is not None and not is_inferred(hints.session)
    return hints.conversation if is_named else 0


def check_name(name: str, param: str) -> None:
    """Raises InvalidRequest unless `name` is valid for a tenant or a fair class."""
    if not _NAME.fullmatch(name):
        reason = f"`{param}` must be 1 to {MAX_NAME} visible ASCII characters."
        raise InvalidRequest(reason, param)


def scope_sessions(hints: Hints, tenant: str) -> Hints:
    """The hints with session names scoped to the tenant."""
    names = hints.session, hints.parent_session, hints.forked_from
    if names == (None, None, None):
        return hints
    session, parent, origin = (None if name is None else scoped(tenant, name) for name in names)
    return replace(hints, session=session, parent_session=parent, forked_from=origin)


class TenantNamespaces:
    """Derives tags and salts from the mesh's secret; raises RuntimeError while it is not set."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    def set_secret(self, secret: bytes) -> None:
        self._secret = secret

    @property
    def fingerprint(self) -> str:
        """Equal for equal secrets, and tells nothing about them."""
        return self._hash(b"secret")[:16]

    def tag(self, owner: str, part: str = "") -> str:
        """The tag of a tenant, or of the part of it that a caller names; empty without a tenant."""
        whole = self._hash(b"owner", owner) if owner else ""
        return f"{whole}/{self._hash(b'part', owner, part)}" if part else whole

    def salt(self, model: str, adapter: str, tenant: str) -> int:
        """The salt of a tenant's prompts; `tenant` is its tag, empty without a tenant."""
        return _salt(model, adapter, tenant, self._key if tenant else b"")

    def _hash(self, kind: bytes, *fields: str) -> str:
        encoded = [field.encode() for field in fields]
        packed = b"".join(len(field).to_bytes(4, "little") + field for field in encoded)
        return blake2b(packed, digest_size=TAG_BYTES, key=self._key, person=kind).hexdigest()

    @property
    def _key(self) -> bytes:
        if len(self._secret) < KEY_BYTES:
            raise RuntimeError("the tenants' secret is not set")
        return self._secret
