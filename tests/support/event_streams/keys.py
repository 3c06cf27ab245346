"""Keys of requests beside their tokens, in an engine and in the mesh."""

from typing import NamedTuple

from kvmesh.bus.messages import Sampling, Work
from kvmesh.hashing import salt
from kvmesh.worker.adapters.kv_events.salts import PromptSalts

MODEL = "m"


class Key(NamedTuple):
    """`salt` is the mesh's, 0 for requests that no prompt of the mesh equals."""

    salt: int
    cache_salt: str | None = None
    extra_key: str | None = None
    adapter: str | None = None


def tenant(name: str, number: int) -> Key:
    """The key of a tenant's requests, as a worker makes it."""
    work = Work(
        request="r",
        frontend="f",
        tokens=b"",
        sampling=Sampling(max_tokens=1),
        salt=number,
        tenant=name,
    )
    return Key(number, PromptSalts(MODEL, 1).cache_salt(work))


PLAIN = Key(salt(MODEL))
TENANTS = (PLAIN, tenant("acme", 0xA1), tenant("acme/dev", 0xB2))
STRANGERS = (PLAIN, Key(0, "mine"), Key(0, "of-a-client-0123456789abcdef"))
