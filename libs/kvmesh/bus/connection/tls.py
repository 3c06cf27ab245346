"""TLS context of the connection to NATS: trusted authority and own certificate."""

import ssl
from pathlib import Path


def tls_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None without an authority and a certificate.

    Raises OSError or ValueError for files that cannot be used.
    """
    if ca is None and cert is None:
        return None
    for file in (ca, cert, key):
        if file is not None and not file.is_file():
            raise FileNotFoundError(f"no such file: {file}")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ValueError(f"nats.tls_ca, tls_cert or tls_key cannot be used: {error}") from error
    return context
