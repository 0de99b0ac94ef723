"""`saccade key NAME`: a new API key and its entry for the key file."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Prints the key to standard error, the only place where it is ever shown, and its entry, which contains only a
    hash of the key, to standard output."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: saccade key NAME >> keys.toml\n\nCreates an API key for the tenant NAME.", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    if not argv[0].strip() or not argv[0].isprintable() or set(argv[0]) & {'"', "\\"}:
        raise ValueError(
            f"NAME: {argv[0]!r} cannot name a tenant: a name must be printable, not blank, without quote or backslash"
        )
    key = "sk-" + secrets.token_urlsafe(32)
    print(f"the key of {argv[0]}, which is not shown again: {key}", file=sys.stderr)
    print(f'[[key]]\nname = "{argv[0]}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n')
    return 0
