"""`saccade key NAME`: a new API key and its entry for the key file."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Prints the key to standard error, where it is shown this once, and the entry, which holds only its hash, to
    standard output."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: saccade key NAME >> keys.toml\n\nMakes an API key for the tenant NAME.", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    if not argv[0].strip() or not argv[0].isprintable() or set(argv[0]) & {'"', "\\"}:
        raise ValueError(f"NAME: {argv[0]!r} is no name of a tenant: it needs a letter, and no quote or backslash")
    key = "sk-" + secrets.token_urlsafe(32)
    print(f"the key of {argv[0]}, shown this once: {key}", file=sys.stderr)
    print(f'[[key]]\nname = "{argv[0]}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n')
    return 0
