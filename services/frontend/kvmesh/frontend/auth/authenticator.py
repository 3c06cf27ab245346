"""Who is asking: finds the account of a request, and keeps the list of keys current."""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvmesh.bus.buckets import keys_bucket, read_bucket
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.frontend.auth.accounts import Account, Accounts, Key, Scope
from kvmesh.frontend.auth.origin_check import foreign
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.namespaces import TenantNamespaces, check_name

log = logging.getLogger(__name__)
RELOAD_S = 1.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A keys file: `[[key]]` tables."""

    key: list[Key] = []


class KeysError(Exception):
    """A keys file cannot be used; `file` names it."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file


def read_keys(file: Path) -> list[Key]:
    """The keys of a TOML file; raises KeysError naming the file and the fault."""
    try:
        return msgspec.toml.decode(file.read_bytes(), type=_File).key
    except OSError as error:
        raise KeysError(file, error.strerror or str(error)) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise KeysError(file, str(error)) from error


class Authenticator:
    """Lets everyone in when there are no keys, else only their holders.

    `local`: only this machine can reach the frontend.
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
        self._bad: dict[str, str] = {}

    @property
    def closed(self) -> bool:
        """Whether keys are asked for at all."""
        return self._file is not None or self._use_bucket

    def account(self, headers: Mapping[str, str]) -> Account | None:
        """None where no keys are configured; raises ApiError (401) for a wrong or missing one.

        Every request passes here first: headers that are no text are refused too (400).
        """
        _check_text(headers)
        return self.accounts.find(secret_of(headers), time.time()) if self.closed else None

    def check_origin(self, method: str, headers: Mapping[str, str]) -> None:
        """Refuse web pages of others (403) where every caller on this machine is let in."""
        if self._local and not self.closed and (fault := foreign(method, headers)) is not None:
            raise ApiError("permission", fault, code="foreign_origin")

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tag of whoever asks: the namespace of what is cached and stored for it."""
        account = self.account(headers)
        own = headers.get("x-tenant-id", "")
        if own:
            check_name(own, "x-tenant-id")
        return self._tag(account, own)

    def bind(self, request: GenerateRequest, account: Account | None) -> None:
        """Say whose a request is, by its key, and bound what it asks for; raises ApiError (403).

        Until then its `cache_salt` is what the caller calls itself, from then on a tag.
        """
        own = request.cache_salt
        if account is not None:
            account.check(request)
        else:
            if request.steers and not self._local:
                raise self._lacking("routing")
            of_class = None if request.hints.fair_class else own or None
            request.hints = replace(request.hints, tenant=of_class)
        request.cache_salt = self._tag(account, own)

    def _tag(self, account: Account | None, own: str) -> str:
        """A caller only divides its key's tenant further; without keys it may be who it says."""
        if account is None:
            return self._tenants.tag(own)
        return self._tenants.tag(account.key.tenant or "", own)

    def permit(self, headers: Mapping[str, str], scope: Scope) -> Account | None:
        """Who may do more than ask models: keys with the scope, or all where only this machine is.

        Raises ApiError (401, 403).
        """
        account = self.account(headers)
        if account is not None:
            account.require(scope)
        elif not self._local:
            raise self._lacking(scope)
        return account

    def shows(self, headers: Mapping[str, str]) -> bool:
        """Whether the caller may see the state of the mesh: everyone without keys, else admins."""
        try:
            account = self.account(headers)
            if account is not None:
                account.require("admin")
        except ApiError:
            return False
        return True

    @staticmethod
    def _lacking(scope: Scope) -> ApiError:
        reason = f"This needs an API key with the scope `{scope}`; no keys are configured."
        return ApiError("permission", reason, code="scope_missing")

    async def open(self) -> None:
        """Read the keys for the first time; raises KeysError."""
        if self.closed:
            await self._reload()

    async def run(self) -> None:
        """Follow changes for ever; a bad change is logged and the keys before it stay."""
        while self.closed:
            await asyncio.sleep(RELOAD_S)
            try:
                await self._reload()
            except (KeysError, BusError) as error:
                self._complain(cause(error))

    def _complain(self, reason: str) -> None:
        if self._stamp != reason:
            self._stamp = reason
            log.error("the API keys stay as they were: %s", reason)

    async def _reload(self) -> None:
        stamp = _stamp(self._file), await self._revision()
        if stamp == self._stamp:
            return
        keys = read_keys(self._file) if self._file is not None else []
        if self._use_bucket:
            keys += await self._bucket_keys()
        self.accounts.replace(keys, asyncio.get_running_loop().time())
        self._stamp = stamp
        log.info("%d API keys", len(self.accounts))

    async def _revision(self) -> int:
        if not self._use_bucket:
            return 0
        bucket = await keys_bucket(self._bus)
        return (await bucket.status()).stream_info.state.last_seq

    async def _bucket_keys(self) -> list[Key]:
        """All keys that can be read; the others are logged once each, and let nobody in."""
        found = await read_bucket(self._bus, self._bus.subjects.keys_bucket)
        keys, bad = [], {}
        for name, value in found.items():
            try:
                keys.append(msgspec.json.decode(value, type=Key))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                bad[name] = str(error)
                if self._bad.get(name) != bad[name]:
                    log.error("the API key %s in the bucket is left out: %s", name, error)
        self._bad = bad
        return keys


def secret_of(headers: Mapping[str, str]) -> str | None:
    """The key as OpenAI's clients send it, or as Anthropic's do."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return headers.get("x-api-key")


def _check_text(headers: Mapping[str, str]) -> None:
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
        raise KeysError(file, error.strerror or str(error)) from error
    return status.st_mtime_ns, status.st_size
