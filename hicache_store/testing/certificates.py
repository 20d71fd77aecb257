"""A throw-away certificate authority and a certificate for this machine, for servers with TLS."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files."""

    authority: str
    certificate: str
    key: str


def make_certificates(directory: Path, host: str = "localhost") -> Certificates:
    """Make an authority and a certificate for ``host`` and 127.0.0.1, valid for a day.

    Needs the package ``cryptography``.
    """
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("hicache tests", "hicache tests", authority_key, authority_key, None)
    names = x509.SubjectAlternativeName(
        [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    server = _certificate(host, "hicache tests", server_key, authority_key, names)
    paths = [directory / name for name in ("authority.pem", "server.pem", "server.key")]
    encoded = [
        authority.public_bytes(serialization.Encoding.PEM),
        server.public_bytes(serialization.Encoding.PEM),
        server_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    ]
    for path, data in zip(paths, encoded, strict=True):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
    return Certificates(*(str(path) for path in paths))


def _certificate(
    subject: str,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    names: x509.SubjectAlternativeName | None,
) -> x509.Certificate:
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA256())
