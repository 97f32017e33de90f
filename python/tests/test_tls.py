"""A store behind TLS, as all but those on loopback are."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay

from .conftest import Child, free_port, wait_until

x509 = pytest.importorskip("cryptography.x509")


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """An authority of its own, which vouches for itself as the server on loopback: certificate and key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a store of a test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=2))
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths = folder / "store.pem", folder / "store.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return paths


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An S3 server that speaks TLS alone, with a bucket; its certificate."""
    pytest.importorskip("moto")
    certificate, key = write_certificate(tmp_path)
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), "-c", str(certificate), "-k", str(key)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint, trust = f"https://127.0.0.1:{port}", ssl.create_default_context(cafile=str(certificate))

    def makes_bucket() -> bool:
        request = urllib.request.Request(f"{endpoint}/checkpoints", method="PUT")
        try:
            urllib.request.urlopen(request, timeout=1, context=trust).close()
            return True
        except OSError:
            return False

    settings = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    try:
        wait_until(makes_bucket)
        yield certificate
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "AWS_CA_BUNDLE"])
def test_a_store_behind_tls_is_saved_to_and_restored_from(store: Path, variable: str) -> None:
    """20 MiB: an upload in parts."""
    state: dict[str, Any] = {"weights": torch.arange(5 << 20, dtype=torch.float32), "n": 1}

    def work(report: Any) -> None:
        # Read once in a process.
        os.environ[variable] = str(store)
        with forebay.Checkpointer("s3://checkpoints/run", every=1) as checkpointer:
            save = checkpointer.step(1, state)
            assert save is not None and save.wait_durable(60)
        restored: dict[str, Any] = {"weights": torch.zeros(5 << 20), "n": 0}
        assert forebay.Checkpointer("s3://checkpoints/run").restore(restored) == 1
        assert torch.equal(restored["weights"], state["weights"]) and restored["n"] == 1
        report("equal")

    child = Child(work)
    assert child.line() == "equal"
    child.kill()


def test_a_certificate_that_is_not_trusted_is_told(store: Path) -> None:
    with pytest.raises(forebay.CheckpointError, match="certificate of the server .* not trusted: .*hint: SSL_CERT_FILE"):
        forebay.Checkpointer("s3://checkpoints/run").steps()
