"""`saccade key NAME`: a new API key and its entry for the key file."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Prints the key to standard error, where it is shown this once, and the entry, which holds only its hash, to
    standard output."""
    if len(argv) != 1 or not argv[0].isprintable() or set(argv[0]) & {'"', "\\"}:
        print("usage: saccade key NAME >> keys.toml", file=sys.stderr)
        return 2
    key = "sk-" + secrets.token_urlsafe(32)
    print(f"the key of {argv[0]}, shown this once: {key}", file=sys.stderr)
    print(f'[[key]]\nname = "{argv[0]}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n')
    return 0
