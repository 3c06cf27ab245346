"""The credentials of each login, read and checked anew every time: their files may be renewed.

Format of a .creds file: https://docs.nats.io/running-a-nats-service/configuration/securing_nats
"""

import base64
import binascii
import json
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from kvmesh.bus.connection.options import BusOptions
from kvmesh.bus.connection.tls import tls_context
from kvmesh.bus.errors import CredentialsUnusable
from kvmesh.settings.secret_file import SecretUnreadable, present

JWT, SEED = "NATS USER JWT", "USER NKEY SEED"
MAX_FILE = 1 << 20
WEBSOCKET = ("ws", "wss")
PORT = 4222
_SECTION = re.compile(r"-{3,}BEGIN ([A-Z ]+?)-{3,}\s*([^\s-]\S*)\s*-{3,}END \1-{3,}")


class _KeyPair(Protocol):
    """The part of `nkeys.KeyPair` used here."""

    @property
    def public_key(self) -> bytes: ...
    def sign(self, data: bytes) -> bytes: ...


class _UserJwt(NamedTuple):
    text: str
    subject: str
    expires: float | None  # Unix time


class Login:
    """The credentials of this process; each method raises CredentialsUnusable.

    The user and password or token in a URL count for every server, discovered ones included, but
    a server whose own URL has others.
    """

    def __init__(self, options: BusOptions) -> None:
        self._options = options
        urls = [_split(url.strip()) for url in options.url.split(",")]
        self.servers = [urlunsplit(url._replace(netloc=_bare(url))) for url in urls]
        named = [(_address(url), _of_url(url)) for url in urls if url.username]
        self._by_server = dict(named)
        self._of_urls = named[0][1] if named else {}

    @property
    def setting(self) -> str:
        """The name of the setting that authenticates this process; empty if there is none."""
        own = self._options
        settings = {
            "nats.nkey_seed": own.nkey_seed,
            f"nats.credentials ({own.credentials})": own.credentials,
            "nats.token": own.token,
            "nats.user and nats.password": own.user,
            "the user in nats.url": self._of_urls,
        }
        return next((name for name, value in settings.items() if value), "")

    @property
    def has_certificate(self) -> bool:
        return self._options.tls_cert is not None

    def check(self) -> None:
        """Read the files."""
        self.fields("", "")
        self.tls()

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for the next connection; None without an authority and a certificate."""
        own = self._options
        return tls_context(own.tls_ca, own.tls_cert, own.tls_key)

    def refusal(self) -> str:
        """The reason why a server refuses the login, as far as the credentials tell it."""
        if self._options.credentials and not self._options.nkey_seed:
            try:
                jwt, _ = _read_credentials(self._options.credentials)
            except CredentialsUnusable as error:
                return f": {error}"
            if jwt.expires is not None and jwt.expires < datetime.now(UTC).timestamp():
                at = datetime.fromtimestamp(jwt.expires, UTC).isoformat(timespec="seconds")
                return f": its JWT expired at {at}"
        return ""

    def fields(self, nonce: str, server: str) -> dict[str, str]:
        """The fields of CONNECT for the server at `server`, host and port, which sent `nonce`."""
        own = self._options
        found: dict[str, str] = {}
        if own.nkey_seed:
            keys = _keys(_secret("nats.nkey_seed", own.nkey_seed).strip(), "nats.nkey_seed")
            if nonce:
                found = {"nkey": keys.public_key.decode(), "sig": _signed(keys, nonce)}
        elif own.credentials:
            jwt, seed = _read_credentials(own.credentials)
            where = f"nats.credentials: {own.credentials}"
            keys = _keys(seed, where)
            if jwt.subject != keys.public_key.decode():
                raise CredentialsUnusable(f"{where} has the seed of another user than its JWT's")
            if nonce:
                found = {"jwt": jwt.text, "sig": _signed(keys, nonce)}
        if own.user and not found:
            found = {"user": own.user, "pass": _secret("nats.password", own.password or "")}
        elif own.token:  # beside a signature it is for the server's auth callout
            found["auth_token"] = _secret("nats.token", own.token)
        return found or self._by_server.get(server, self._of_urls)


def _secret(setting: str, value: str) -> str:
    try:
        return present(value)
    except SecretUnreadable as error:
        raise CredentialsUnusable(f"{setting}_file: {error}") from error


def _keys(seed: str, where: str) -> _KeyPair:
    import nkeys  # with libraries that take a megabyte

    try:
        if seed.startswith("SU"):
            keys: _KeyPair = nkeys.from_seed(bytearray(seed.encode()))
            return keys
    except (nkeys.NkeysError, ValueError):
        pass
    raise CredentialsUnusable(f"{where}: not the seed of a user's nkey, which begins with SU")


def _signed(keys: _KeyPair, nonce: str) -> str:
    return base64.b64encode(keys.sign(nonce.encode())).decode()


def _read_credentials(path: str) -> tuple[_UserJwt, str]:
    """The JWT and the seed of a .creds file."""
    where = f"nats.credentials: {path}"
    try:
        with Path(path).open(encoding="ascii") as file:
            text = file.read(MAX_FILE)
    except OSError as error:
        reason = f"nats.credentials: cannot read {path}: {error.strerror or error}"
        raise CredentialsUnusable(reason) from error
    except UnicodeDecodeError:
        raise CredentialsUnusable(f"{where} is not a .creds file, but binary") from None
    found = dict(_SECTION.findall(text))
    missing = [name for name in (JWT, SEED) if name not in found]
    if missing:
        text = "is empty" if not text.strip() else f"has no whole section {' and '.join(missing)}"
        raise CredentialsUnusable(f"{where} {text}; `nsc generate creds` writes both sections")
    return _user_jwt(found[JWT], where), found[SEED]


def _user_jwt(text: str, where: str) -> _UserJwt:
    try:
        _, payload, _ = text.split(".")
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        kind, subject, expires = claims["nats"]["type"], claims["sub"], claims.get("exp")
    except (ValueError, binascii.Error, KeyError, TypeError):
        raise CredentialsUnusable(f"{where}: its JWT cannot be decoded") from None
    if kind != "user":
        raise CredentialsUnusable(f"{where} has the JWT of an {kind}, not of a user")
    return _UserJwt(text, str(subject), float(expires) if expires else None)


def _split(url: str) -> SplitResult:
    return urlsplit(url if "://" in url else f"nats://{url}")


def _bare(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]


def _address(url: SplitResult) -> str:
    """Host and port as nats-py writes them."""
    bare = _bare(url)
    return bare if url.port is not None or url.scheme in WEBSOCKET else f"{bare}:{PORT}"


def _of_url(url: SplitResult) -> dict[str, str]:
    user = unquote(url.username or "")
    if url.password is None:
        return {"auth_token": user}
    return {"user": user, "pass": unquote(url.password)}
