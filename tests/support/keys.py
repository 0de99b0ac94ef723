"""A key file for tests, and calls that must be refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc import reason

KEYS = {
    "one": "sk-secret-one",
    "two": "sk-secret-two",
    "boss": "sk-secret-boss",
    "slow": "sk-secret-slow",
    "metered": "sk-secret-metered",
}
FIELDS = {
    "boss": 'scopes = ["inference", "admin"]', "slow": "requests_per_minute = 3\ntokens_per_minute = 60",
    "metered": "requests_per_minute = 3",
}  # fmt: skip


def key_file(path: Path, keys: dict[str, str] = KEYS) -> str:
    path.write_text(
        "".join(
            f'[[key]]\nname = "{n}"\nsha256 = "{hashlib.sha256(k.encode()).hexdigest()}"\n{FIELDS.get(n, "")}\n'
            for n, k in keys.items()
        )
    )
    return str(path)


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


def fails(call: Any, *arguments: Any, **keywords: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **keywords)
    return reason(error.value)
