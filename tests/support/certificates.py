"""Temporary certificates, made by openssl: an authority, and certificates that it signs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Authority:
    """A self-signed certificate `ca.pem` and its key in a folder of its own."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Authority:
        folder.mkdir(parents=True)
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj",
            "/CN=test authority", "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem"),
        )  # fmt: skip
        return cls(folder)

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str) -> tuple[Path, Path]:
        """(certificate, key) for 127.0.0.1, localhost and site.test, which no name server resolves."""
        certificate, key, request = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        extensions = self.folder / f"{name}.cnf"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:site.test\n")
        _openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}", "-keyout",
            str(key), "-out", str(request),
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self.folder / "ca.key"),
            "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(certificate),
        )  # fmt: skip
        return certificate, key
