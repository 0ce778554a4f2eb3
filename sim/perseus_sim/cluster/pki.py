"""Throw-away certificates: an authority made on the fly, and what it signs, as PEM.

Nothing here is for production: keys are unencrypted, lifetimes
are a few days, nothing is revoked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = timedelta(days=7)
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key."""

    certificate: bytes
    key: bytes


def private_key() -> ec.EllipticCurvePrivateKey:
    """A new key; P-256, which takes no time to make."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, in the older form: Kubernetes reads no other for service accounts."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


class Authority:
    """A certificate authority whose key exists only in this object."""

    def __init__(self, name: str) -> None:
        self._key = private_key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        common_name: str,
        *,
        organization: str = "",
        hosts: tuple[str, ...] = (),
        client: bool = False,
        lifetime: timedelta = _LIFETIME,
    ) -> KeyPair:
        """A server certificate for the hosts (names or addresses), or without hosts a client's; ``client``: both.

        Its validity began a little before now: with a negative lifetime it is over.
        """
        names = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organization:
            names.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        key = private_key()
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
        if client or not hosts:
            usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        builder = self._builder(x509.Name(names), key, lifetime).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), key_pem(key))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, lifetime: timedelta = _LIFETIME
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + lifetime)
        )


def write_pairs(folder: Path, authority: Authority, names: Iterable[str]) -> None:
    """Files as agent and operator read them: ``ca.crt``, and for each name its ``.crt`` and ``.key``."""
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_bytes(authority.certificate)
    for name in names:
        pair = authority.issue(name, hosts=(name,), client=True)
        (folder / f"{name}.crt").write_bytes(pair.certificate)
        (folder / f"{name}.key").write_bytes(pair.key)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
