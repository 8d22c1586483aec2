"""Keys for a deployment: a certificate authority, the server's certificate, a key pair per node.

Private files are readable by their owner only. `ca.key` is needed for new certificates only and
should not be kept on the server.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fairvar.errors import BadInput, RunFailed, shown

Key = ec.EllipticCurvePrivateKey
AUTHORITY = "fairvar authority"
HOST = re.compile(r"(?a:(\*\.)?[\w-]+(\.[\w-]+)*)")
# A SuperLink that listens on all interfaces starts the ServerApp with this address of its own.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make_keys(folder: Path, nodes: int, hosts: Sequence[str], days: int = 365) -> list[Path]:
    """ca.crt, ca.key, server.pem, server.key (for these host names and addresses, and for those of
    the machine itself), node-0 …"""
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{folder} is not empty; keys are never overwritten: choose another folder")
    if nodes < 1 or days < 1 or not hosts:
        raise BadInput("keys need at least one node, one day and one host name of the server")
    for host in hosts:
        if len(host) > 253 or not (HOST.fullmatch(host) or _is_address(host)):
            raise BadInput(f"host {shown(host)}: give an ASCII name, such as fl.example.org, or an "
                           "IP address")  # fmt: skip
    authority, server = _key(), _key()
    private = {"ca.key": _private(authority), "server.key": _private(server)}
    root = _certificate(authority, AUTHORITY, authority, days, None)
    names = list(dict.fromkeys([*hosts, *LOOPBACK]))
    leaf = _certificate(server, hosts[0][:64], authority, days, names)  # 64 fit into a subject
    public = {
        "ca.crt": root.public_bytes(Encoding.PEM),
        "server.pem": leaf.public_bytes(Encoding.PEM),
    }
    for number in range(nodes):
        key = _key()
        private[f"node-{number}"] = _private(key, PrivateFormat.OpenSSH)
        ssh = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        public[f"node-{number}.pub"] = ssh
    written = [_write(folder / name, content, 0o600) for name, content in private.items()]
    return written + [_write(folder / name, content, 0o644) for name, content in public.items()]


def _key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _private(key: Key, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _certificate(
    key: Key, name: str, signer: Key, days: int, hosts: Sequence[str] | None
) -> x509.Certificate:
    """Of a server with these names and addresses; of the authority if `hosts` is None."""
    now, authority = datetime.now(UTC), hosts is None
    usage = x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(own, critical=False)
        .add_extension(issuer, critical=False)
        .add_extension(usage, critical=True)
    )
    if hosts is not None:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(serves, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _host(host: str) -> x509.GeneralName:
    if _is_address(host):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror or error}") from None
    return path
