"""Authentication and authorization of requests, by API keys of a file or a bucket."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.bus.ticks import next_tick
from kvmesh.frontend.auth.accounts import Account, Accounts, Key, Scope
from kvmesh.frontend.auth.origin_check import cross_origin_fault, form_fault
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.namespaces import TenantNamespaces, check_name

log = logging.getLogger(__name__)
RELOAD_S = 1.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of a keys file: `[[key]]` tables."""

    key: list[Key] = []


class _Revision(NamedTuple):
    """A state of the bucket, as far as one connection tells it.

    A bucket made anew, or an older copy of it, may have as many entries as the one before.
    """

    created: object  # None: there is no bucket
    last_seq: int
    connected_at: float


class KeysError(Exception):
    """The keys file cannot be read or decoded."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file


def read_keys(file: Path) -> list[Key]:
    """The keys of a TOML file; raises KeysError."""
    try:
        return msgspec.toml.decode(file.read_bytes(), type=_File).key
    except OSError as error:
        raise _unreadable(file, error) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise KeysError(file, str(error)) from error


class Authenticator:
    """Admits everyone if no keys are configured, else holders of a key.

    `local`: the frontend listens on loopback only.
    """

    def __init__(
        self, bus: Bus, file: Path | None, use_bucket: bool, local: bool, tenants: TenantNamespaces
    ) -> None:
        self._bus = bus
        self._tenants = tenants
        self._file = file
        self._use_bucket = use_bucket
        self._local = local
        self.accounts = Accounts()
        self._stamp: object = None
        self._revision_seen: _Revision | None = None
        self._names: set[str] = set()
        self._invalid: dict[str, str] = {}

    @property
    def requires_keys(self) -> bool:
        """True if a keys file or bucket is configured."""
        return self._file is not None or self._use_bucket

    def account(self, headers: Mapping[str, str]) -> Account | None:
        """The caller's account, None without configured keys.

        Raises ApiError: 401 for a missing or invalid key, 400 for headers that are not UTF-8.
        """
        _check_utf8(headers)
        return self._authenticate(secrets_of(headers)) if self.requires_keys else None

    def account_of(self, digest: str) -> Account | None:
        """The account of the key with this hash, None without configured keys.

        Raises ApiError (401) if the key is gone, or if there are keys now and were none before.
        """
        if not self.requires_keys:
            return None
        return self.accounts.of_key(digest, self._bus.clock.time(time.time()))

    def _authenticate(self, secrets: list[str]) -> Account:
        """The account of the first valid secret."""
        now = self._bus.clock.time(time.time())
        for secret in secrets[:-1]:
            with contextlib.suppress(ApiError):
                return self.accounts.authenticate(secret, now)
        return self.accounts.authenticate(secrets[-1] if secrets else None, now)

    def check_origin(
        self, method: str, headers: Mapping[str, str], allowed: bool = False, forms: bool = False
    ) -> None:
        """Raises ApiError (403, 415) for web pages of other origins, if loopback needs no key.

        `allowed`: the settings allow pages of the request's origin. `forms`: the request is one for
        which clients send forms; browsers name the origin of those.
        """
        if not self._local or self.requires_keys:
            return
        if (fault := cross_origin_fault(method, headers, allowed)) is not None:
            raise ApiError("permission", fault, code="foreign_origin")
        if not allowed and not forms and (fault := form_fault(method, headers)) is not None:
            raise ApiError("unsupported_media", fault, code="content_type")

    def tenant(self, headers: Mapping[str, str], account: Account | None) -> str:
        """The tag of the caller's tenant: the namespace of its caches and stored responses."""
        name = headers.get("x-tenant-id", "")
        if name:
            check_name(name, "x-tenant-id")
        return self._tag(account, name)

    def bind(self, request: GenerateRequest, account: Account | None) -> None:
        """Set the request's owner and tenant and bound its hints; raises ApiError (403).

        Replaces `cache_salt`, the name given by the caller, with the tenant's tag.
        """
        name = request.tenant_name = request.cache_salt
        if account is not None:
            request.tenant_name = account.key.tenant or ""
            request.key_name = account.key.name
            account.authorize(request)
        else:
            if request.steers_routing and not self._local:
                raise self._missing_scope("routing")
            fair_class = None if request.hints.fair_class else name or None
            request.hints = replace(request.hints, tenant=fair_class)
        request.cache_salt = self._tag(account, name)

    def _tag(self, account: Account | None, name: str) -> str:
        """Tag of the part `name` of the key's tenant; without keys, of the tenant `name`."""
        if account is None:
            return self._tenants.tag(name)
        return self._tenants.tag(account.key.tenant or "", name)

    def require_scope(self, headers: Mapping[str, str], scope: Scope) -> Account | None:
        """The caller's account if it has the scope; without keys only local callers have it.

        Raises ApiError (401, 403).
        """
        account = self.account(headers)
        if account is not None:
            account.require_scope(scope)
        elif not self._local:
            raise self._missing_scope(scope)
        return account

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """True if the caller may see the mesh's state: has the scope "admin", or no keys exist."""
        try:
            account = self.account(headers)
            if account is not None:
                account.require_scope("admin")
        except ApiError:
            return False
        return True

    @staticmethod
    def _missing_scope(scope: Scope) -> ApiError:
        reason = f"An API key with the scope `{scope}` is required; no keys are configured."
        return ApiError("permission", reason, code="scope_missing")

    async def open(self) -> None:
        """Read the keys for the first time; raises KeysError."""
        if self.requires_keys:
            await self._reload()

    async def run(self) -> None:
        """Reload changed keys until cancelled; an invalid change is logged and not applied."""
        while self.requires_keys:
            await next_tick(RELOAD_S)
            try:
                await self._reload()
            except (KeysError, BusError) as error:
                self._log_failure(cause(error))

    def _log_failure(self, reason: str) -> None:
        if self._stamp != reason:
            self._stamp = reason
            log.error("API keys not reloaded: %s", reason)

    async def _reload(self) -> None:
        revision = await self._revision()
        stamp = _stamp(self._file), revision
        if stamp == self._stamp:
            return
        keys = read_keys(self._file) if self._file is not None else []
        if revision is not None:
            stored = await self._bucket_keys() if revision.created is not None else []
            self._note_loss(revision, {key.name for key in stored})
            keys += stored
        self.accounts.replace(keys, asyncio.get_running_loop().time())
        self._stamp = stamp
        log.info("loaded %d API keys", len(self.accounts))

    async def _revision(self) -> "_Revision | None":
        if not self._use_bucket:
            return None
        try:
            info = await self._bus.js.stream_info(f"KV_{self._bus.subjects.keys_bucket}")
        except NotFound:  # the first key creates it
            return _Revision(None, 0, self._bus.connected_at)
        return _Revision(info.created, info.state.last_seq, self._bus.connected_at)

    def _note_loss(self, revision: "_Revision", names: set[str]) -> None:
        """Log the keys that a lost bucket, or an older copy of it, has taken or brought back."""
        before, self._revision_seen = self._revision_seen, revision
        known, self._names = self._names, names
        if before is None or before.created is None:
            return
        if before.created == revision.created and before.last_seq <= revision.last_seq:
            return
        changes = {"are gone": known - names, "are valid again": names - known}
        listed = [f"{', '.join(sorted(each))} {what}" for what, each in changes.items() if each]
        if listed:
            about = f"the bucket of API keys was lost or is an older copy: {'; '.join(listed)}"
            keeper_of(self._bus).report("API keys", about)

    async def _bucket_keys(self) -> list[Key]:
        """The valid keys of the bucket; logs each invalid entry once."""
        found = await read_bucket(self._bus, self._bus.subjects.keys_bucket)
        keys, invalid = [], {}
        for name, value in found.items():
            try:
                keys.append(msgspec.json.decode(value, type=Key))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                invalid[name] = str(error)
                if self._invalid.get(name) != invalid[name]:
                    log.error("API key %s in the bucket is invalid: %s", name, error)
        self._invalid = invalid
        return keys


def secrets_of(headers: Mapping[str, str]) -> list[str]:
    """The secrets in `Authorization: Bearer` (OpenAI) and `x-api-key` (Anthropic), in this order.

    Clients with settings for both APIs send both, one of them often a placeholder.
    """
    found = []
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        found.append(bearer[7:].strip())
    if (key := headers.get("x-api-key")) is not None:
        found.append(key)
    return found


def _check_utf8(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InvalidRequest(f"Header `{name}` is not valid UTF-8.") from None


def _stamp(file: Path | None) -> object:
    if file is None:
        return None
    try:
        status = file.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    return status.st_mtime_ns, status.st_size


def _unreadable(file: Path, error: OSError) -> KeysError:
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        reason += (
            f": user {os.getuid()}, as which this process runs, has to be permitted to read it"
        )
    return KeysError(file, reason)
