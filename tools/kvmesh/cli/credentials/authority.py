"""The mesh's certificate authority: issues ECDSA P-256 certificates to servers and clients."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
SKEW = timedelta(minutes=5)  # tolerated clock difference between machines
_SIGNING = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
_HANDSHAKES = x509.KeyUsage(True, False, False, False, False, False, False, False, False)


class AuthorityError(Exception):
    """The files of an authority are invalid."""


@dataclass(frozen=True)
class CertificatePair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Issues certificates; `now` is the time of issue."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, mesh: str, now: datetime) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"kvmesh {mesh}")
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        certificate = (
            _builder(name, name, key, now, AUTHORITY_DAYS)
            .add_extension(constraint, critical=True)
            .add_extension(_SIGNING, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, pair: CertificatePair) -> "Authority":
        """Load an authority from its certificate and key; raises AuthorityError."""
        try:
            key = serialization.load_pem_private_key(pair.key, password=None)
            certificate = x509.load_pem_x509_certificate(pair.certificate)
        except (ValueError, TypeError) as error:
            raise AuthorityError(str(error)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise AuthorityError("the key of the authority is not an ECDSA key")
        return cls(certificate, key)

    @property
    def pair(self) -> CertificatePair:
        return _pair(self._certificate, self._key)

    @property
    def expires(self) -> datetime:
        return self._certificate.not_valid_after_utc

    def issue(
        self, name: str, hosts: Sequence[str], now: datetime, days: int, member: bool = False
    ) -> CertificatePair:
        """Issue a certificate: for a server named `hosts`, or without hosts for a client.

        A `member` of a cluster is also a client of the other servers.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
        if member or not hosts:
            usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        public = self._key.public_key()
        builder = (
            _builder(_name(name), self._certificate.subject, key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_HANDSHAKES, critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        # signed with the authority's key; `key` is the subject's
        return _pair(builder.sign(self._key, hashes.SHA256()), key)


def _builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - SKEW)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> CertificatePair:
    return CertificatePair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
