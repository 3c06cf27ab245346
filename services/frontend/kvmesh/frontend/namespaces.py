"""Whose names are whose: what tenants call alike is kept apart on the wire.

A tenant's name is chosen by people, and part of it by callers. On the wire stands a tag instead: a
keyed hash of it with 128 bits, which nobody who lacks the key can foresee or collide with.
"""

import re
from hashlib import blake2b

from msgspec.structs import replace

from kvmesh.bus.messages import Hints
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.hashing import salt

SEPARATOR = "\x1f"
TAG_BYTES = 16
KEY_BYTES = 32
MAX_NAME = 128
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME}}}")


def scoped(tenant: str, name: str) -> str:
    """A name within a tenant, given by its tag; nobody outside of it can form the same one."""
    name = name.replace(SEPARATOR, "")
    return f"{tenant}{SEPARATOR}{name}" if tenant else name


def inferred(tenant: str, name: str) -> str:
    """A name within a tenant that no caller can say, not even one of the tenant's own."""
    return f"{tenant}{SEPARATOR}{SEPARATOR}{name}"


def check_name(name: str, what: str) -> None:
    """Raise InvalidRequest unless a caller may call a tenant or a class so."""
    if not _NAME.fullmatch(name):
        reason = f"`{what}` must be 1 to {MAX_NAME} visible ASCII characters."
        raise InvalidRequest(reason, what)


def scope_sessions(hints: Hints, tenant: str) -> Hints:
    """The sessions of a request, within its tenant."""
    session, parent = hints.session, hints.parent_session
    if session is None and parent is None:
        return hints
    return replace(
        hints,
        session=None if session is None else scoped(tenant, session),
        parent_session=None if parent is None else scoped(tenant, parent),
    )


class TenantNamespaces:
    """Derives tags and salts from the mesh's secret; without one it derives none."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    def unlock(self, secret: bytes) -> None:
        """Take the mesh's secret."""
        self._secret = secret

    def tag(self, owner: str, part: str = "") -> str:
        """The tag of a tenant, or of a part of it that a caller names; empty for nobody."""
        whole = self._hash(b"owner", owner) if owner else ""
        return f"{whole}/{self._hash(b'part', owner, part)}" if part else whole

    def salt(self, model: str, adapter: str, tenant: str) -> int:
        """The salt that precedes the first block of a tenant's prompts; `tenant` is its tag."""
        return salt(model, adapter, tenant, self._key if tenant else b"")

    def _hash(self, kind: bytes, *fields: str) -> str:
        encoded = [field.encode() for field in fields]
        packed = b"".join(len(field).to_bytes(4, "little") + field for field in encoded)
        return blake2b(packed, digest_size=TAG_BYTES, key=self._key, person=kind).hexdigest()

    @property
    def _key(self) -> bytes:
        if len(self._secret) < KEY_BYTES:
            raise RuntimeError("the secret of the tenants has not been read")
        return self._secret
