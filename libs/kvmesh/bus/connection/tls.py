"""TLS context of the connection to NATS: trusted authority and own certificate."""

import ssl
from pathlib import Path

from kvmesh.bus.errors import CredentialsUnusable

KEY = b"PRIVATE KEY-----"


def tls_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None without an authority and a certificate.

    Raises CredentialsUnusable for files that cannot be used.
    """
    if key is not None and cert is None:
        raise CredentialsUnusable("nats.tls_key is set without nats.tls_cert")
    if ca is not None:
        _pem("nats.tls_ca", ca)
    if cert is not None and key is None and KEY not in _pem("nats.tls_cert", cert):
        raise CredentialsUnusable(f"nats.tls_cert: {cert} holds no key: set nats.tls_key")
    if cert is not None and key is not None:
        _pem("nats.tls_cert", cert)
        if KEY not in _pem("nats.tls_key", key):
            raise CredentialsUnusable(f"nats.tls_key: {key} holds no private key")
    if ca is None and cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise CredentialsUnusable(f"nats.tls_ca: {ca} holds no certificate: {error}") from error
    if cert is not None:
        try:
            # without a password OpenSSL would ask for one at the terminal
            context.load_cert_chain(cert, key, password="")
        except ssl.SSLError as error:
            files = f"{cert} with the key in {key or cert}"
            reason = f"nats.tls_cert, nats.tls_key: {files}: {error.reason or 'not readable'}"
            raise CredentialsUnusable(reason) from error
    return context


def _pem(setting: str, file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = f"{setting}: cannot read {file}: {error.strerror or error}"
        raise CredentialsUnusable(reason) from error
    if b"-----BEGIN " not in content:
        text = "is no PEM file" if content.strip() else "is empty"
        raise CredentialsUnusable(f"{setting}: {file} {text}")
    return content
