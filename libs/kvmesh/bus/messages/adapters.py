"""Identities of LoRA adapters: `NAME@DIGEST`, the name for callers and a digest of the content.

Cards, requests, salts and block digests contain identities, so a changed adapter shares no block
with the adapter of the same name before it. An engine that does not know the content of its
adapters has bare names as identities.
"""

import re

DIGITS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_IDENTITY = re.compile(rf"(.+)@[0-9a-f]{{{DIGITS}}}", re.DOTALL)


def adapter_identity(name: str, digest: str) -> str:
    """The identity of an adapter whose content has this digest of DIGITS hexadecimal digits."""
    return f"{name}@{digest}"


def adapter_name(identity: str) -> str:
    """The name for callers of an adapter."""
    match = _IDENTITY.fullmatch(identity)
    return match[1] if match else identity


def is_adapter_name(text: str) -> bool:
    """True if an adapter may have this name."""
    return _NAME.fullmatch(text) is not None
