"""Checks a NATS server's configuration when a process starts, and explains its refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.api_errors import (
    ACCOUNT_FULL,
    ADVICE,
    FILES_FULL,
    MEMORY_FULL,
    NOT_FOR_ACCOUNT,
    RESOURCES,
)
from kvmesh.bus.connection.translation import bus_errors
from kvmesh.bus.errors import (
    BusError,
    JetStreamError,
    JetStreamUnavailable,
    NotFound,
    OutOfReach,
    ServerUnfit,
)

MIN_PAYLOAD = 1 << 20
RECOMMENDED_PAYLOAD = "8MB"
OLDEST = (2, 12)  # the oldest server that is tested
JETSTREAM = "jetstream { store_dir: … }"
INFO_S = 10.0
ENABLING_S = 2.0
PAUSE_S = 0.1


class _Limits(Struct):
    max_memory: int = -1
    max_storage: int = -1


class _Use(Struct):
    """The use of an account's storage, or of one of its tiers, in bytes."""

    memory: int = 0
    storage: int = 0
    reserved_memory: int = 0
    reserved_storage: int = 0
    limits: _Limits = msgspec.field(default_factory=_Limits)


class _Account(_Use):
    tiers: dict[str, _Use] = {}


class _Storage(NamedTuple):
    """The names of the limits of one kind of storage."""

    account: str
    jwt: str
    server: str


FILES = _Storage("max_file", "disk_storage", "max_file_store")
MEMORY = _Storage("max_mem", "mem_storage", "max_memory_store")
_account = msgspec.json.Decoder(_Account)


async def check_server(bus: Bus) -> str:
    """The JetStream domain of the mesh, empty if it has no name.

    Raises ServerUnfit for unsuitable server settings, another BusError for other failures.
    """
    if reason := too_small(bus):
        raise ServerUnfit(reason)
    try:
        return await _domain(bus)
    except JetStreamError as error:
        if _is_absent(error) and not bus.is_clustered:
            raise (ServerUnfit if bus.js.is_own else OutOfReach)(absence(bus)) from error
        if error.err_code == NOT_FOR_ACCOUNT:
            advice = ADVICE[NOT_FOR_ACCOUNT]
            raise ServerUnfit(f"the NATS account has no JetStream: {advice}") from error
        raise


def too_small(bus: Bus) -> str:
    """The reason why messages are too small for a mesh, with the setting; empty if they are not."""
    if bus.max_payload >= MIN_PAYLOAD:
        return ""
    return (
        f"NATS accepts too small messages ({bus.payload_limit}): set max_payload to"
        f" {RECOMMENDED_PAYLOAD}, or at least 1MB, in {_place_of_payload(bus)}"
    )


async def _domain(bus: Bus) -> str:
    """The JetStream domain. An account of a JWT gets one only after its first connection."""
    now = asyncio.get_running_loop().time
    ends = now() + ENABLING_S
    while True:
        try:
            return (await bus.js.account_info()).domain or ""
        except JetStreamError as error:
            enabling = bus.js.is_own and bus.client.server_has_jetstream and _is_absent(error)
            if not enabling or bus.is_clustered or now() > ends:
                raise
        await asyncio.sleep(PAUSE_S)


def _is_absent(error: JetStreamError) -> bool:
    """True if nobody listens on JetStream's subjects; in a cluster, a server may soon."""
    unavailable = isinstance(error, JetStreamUnavailable) and error.code == 503
    return unavailable and error.err_code is None


async def founds_mesh(bus: Bus, domain: str) -> bool:
    """True if the server is in a JetStream `domain` that has no streams of the mesh yet.

    Leaf nodes have domains, so the mesh may well be in another.
    """
    if not domain or not bus.js.is_own:
        return False
    try:
        await bus.js.stream_info(bus.subjects.kv_stream)
    except NotFound:
        return True
    return False


def old_version(bus: Bus) -> str:
    """A warning about a server that is older than those tested; empty for others."""
    version = bus.server_version
    if tuple(map(int, version.split(".")[:2])) >= OLDEST:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return f"nats-server {version} is older than {oldest}, the oldest that kvmesh is tested with"


def _place_of_payload(bus: Bus) -> str:
    if bus.payload_is_the_servers:
        return "the server's configuration"
    return "the limits of the account (`payload` in its JWT or the user's)"


def absence(bus: Bus) -> str:
    """The reason why no JetStream answers, with the setting."""
    if not bus.js.is_own:
        return (
            f"no JetStream answers under {bus.js.prefix}: this server's link to it is down, or"
            " nats.domain or nats.api_prefix is wrong"
        )
    if not bus.client.server_has_jetstream:
        return (
            f"the NATS server runs without JetStream: add {JETSTREAM} to its configuration, or at"
            " a leaf node set nats.domain to the hub's"
        )
    return (
        f"the NATS account has no JetStream: {ADVICE[NOT_FOR_ACCOUNT]}; limits above the server's"
        " own, which its log names, have the same effect"
    )


@asynccontextmanager
async def explained_refusal(bus: Bus, stream: str, size: float) -> AsyncIterator[None]:
    """Turn a refusal of a stream of `size` bytes into a ServerUnfit that names the limit."""
    try:
        yield
    except JetStreamError as error:
        needed = f"needs {size / (1 << 20):.0f} MiB; " if size > 0 else ""
        if error.err_code in (ACCOUNT_FULL, RESOURCES, MEMORY_FULL, FILES_FULL):
            storage = MEMORY if error.err_code == MEMORY_FULL else FILES
            lower = ", or lower the *_bytes of [streams]" if size > 0 else ""
            reason = f"{needed}raise {await _limit_of(bus, storage, size)}{lower}"
        elif error.err_code in ADVICE:
            reason = f"{needed}{error}"
        else:
            raise
        raise ServerUnfit(f"NATS cannot store {stream}: {reason}") from error


async def _limit_of(bus: Bus, storage: _Storage, size: float) -> str:
    """The limit that leaves no room for `size` bytes: the account's, or the server's."""
    server = f"{storage.server} in the server's configuration"
    try:
        with bus_errors():
            reply = await bus.client.request(f"{bus.js.prefix}.INFO", b"", timeout=INFO_S)
        account = _account.decode(reply.data)
    except (BusError, msgspec.MsgspecError):
        return server
    use = account.tiers.get(f"R{bus.options.replicas}", account)
    if storage is MEMORY:
        limit, used = use.limits.max_memory, max(use.memory, use.reserved_memory)
    else:
        limit, used = use.limits.max_storage, max(use.storage, use.reserved_storage)
    if limit < 0 or used + size <= limit:
        return server
    return f"{storage.account} in the account's jetstream limits (`{storage.jwt}` in its JWT)"
