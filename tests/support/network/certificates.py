"""A certificate authority of the tests, and server certificates."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_PEM = serialization.Encoding.PEM


class CertificateFiles(NamedTuple):
    """PEM files of a server: its certificate and its private key."""

    cert: Path
    key: Path

    def to_env(self) -> dict[str, str]:
        return {"EDL_TLS_CERT": str(self.cert), "EDL_TLS_KEY": str(self.key)}


class Authority:
    """Signs certificates, which are valid for an hour; `ca` is the PEM file to trust."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca = folder / "ca.crt"
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"edl test {folder.name}")])
        usage = dict.fromkeys(
            (
                *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
                *("key_agreement", "encipher_only", "decipher_only"),
            ),
            False,
        )
        own = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca.write_bytes(own.public_bytes(_PEM))

    def sign(self, *names: str) -> CertificateFiles:
        """Return a certificate for a server with these names or IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = (
            self._builder(subject, key)
            .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = CertificateFiles(self._folder / f"{names[0]}.crt", self._folder / f"{names[0]}.key")
        files.cert.write_bytes(certificate.public_bytes(_PEM))
        plain = serialization.NoEncryption()
        files.key.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
