"""API keys: who calls, what they may use and how much of it.

A key file is TOML, one table for each key; it holds hashes, never keys:

    [[key]]
    name = "team-a"                  # the tenant: caches, media and rates are shared within it and with nobody else
    sha256 = "9f86d0..."             # of the key; `saccade key team-a` prints a new key and its table
    scopes = ["inference", "batch"]  # the default; the others are "admin" and "encoder"
    requests_per_minute = 600        # optional, as are the next two
    tokens_per_minute = 100000
    bytes_per_minute = "1Gi"

A key has 256 random bits, so its plain SHA-256 hash cannot be inverted by guessing; a slow password hash would only
take time in each call.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from service.common import errors
from service.common.config import ConfigError
from service.common.http_requests import CHECK_KEY
from service.common.limits import RateLimits
from service.common.settings import parse_size
from service.common.watch import Watched

SCOPES = ("inference", "batch", "admin", "encoder")
DEFAULT_SCOPES = frozenset({"inference", "batch"})
_SCOPE_OF_SERVICE = {
    "saccade.v1.AdminService": "admin",
    "saccade.v1.BatchService": "batch",
    "saccade.v1.EncoderService": "encoder",
}
_FIELDS = {"name", "sha256", "scopes", *(f"{kind}_per_minute" for kind in RateLimits.KINDS)}


@dataclass(frozen=True)
class Tenant:
    """The tenant of a call. `salt` separates caches, request ids and media of tenants; empty without keys."""

    name: str = ""
    salt: bytes = b""
    scopes: frozenset[str] = DEFAULT_SCOPES
    limits: RateLimits = field(default_factory=lambda: RateLimits({}), compare=False)


def scope_of(method: str) -> str:
    """The scope that a key needs to call `/package.Service/Method`."""
    return _SCOPE_OF_SERVICE.get(method.rpartition("/")[0].removeprefix("/"), "inference")


class Guard:
    """Finds the tenant of a call by the call's metadata, and checks what the tenant may do."""

    def __init__(self, keys: Watched[dict[bytes, Tenant]] | None, *, admin: bool = False) -> None:
        """Without `keys` all callers are one tenant, which has the scope "admin" if `admin` is set."""
        self._keys = keys
        self._anyone = Tenant(scopes=DEFAULT_SCOPES | {"encoder"} | ({"admin"} if admin else frozenset()))

    def identify(self, metadata: Mapping[str, str | bytes]) -> Tenant:
        """The tenant of a call. Raises Unauthenticated."""
        return self._anyone if self._keys is None else self._tenant(metadata)

    def admit(self, method: str, tenant: Tenant) -> None:
        """Counts a call. Raises PermissionDenied, or ResourceExhausted if the key's request rate is exhausted."""
        if method == CHECK_KEY:
            return
        scope = scope_of(method)
        if scope not in tenant.scopes:
            raise errors.PermissionDenied(f"this method needs the scope {scope!r}, which {_lacks(tenant, scope)}")
        tenant.limits.admit("requests", 1)

    def named(self, name: str, scope: str) -> Tenant | None:
        """The tenant of this name; None if no key (any longer) gives it this scope."""
        if self._keys is None:
            return self._anyone if not name else None
        tenants = self._keys.current().values()
        return next((tenant for tenant in tenants if tenant.name == name and scope in tenant.scopes), None)

    def _tenant(self, metadata: Mapping[str, str | bytes]) -> Tenant:
        assert self._keys is not None
        presented = _presented_key(metadata)
        if presented is None:
            raise errors.Unauthenticated("this server needs an API key; send it as `authorization: Bearer KEY`")
        digest = hashlib.sha256(presented).digest()
        found: Tenant | None = None
        # Compares with all keys, so that the time taken does not reveal which one matched.
        for known, tenant in self._keys.current().items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise errors.Unauthenticated("this server does not know the API key")
        return found


def _lacks(tenant: Tenant, scope: str) -> str:
    """The end of the message for a caller who lacks the scope: who lacks it, and how to get it."""
    if tenant.name:
        return f"the key {tenant.name!r} lacks; add it to `scopes` of the key in the server's --api-keys file"
    if scope == "admin":
        return "callers without a key lack; start the server with --admin (or SACCADE_ADMIN=1) to give it to them"
    return "callers without a key lack"


def _presented_key(metadata: Mapping[str, str | bytes]) -> bytes | None:
    value = metadata.get("authorization")
    if value is None:
        value = metadata.get("x-api-key")
        return None if value is None else _bytes(value)
    scheme, _, key = _bytes(value).partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and key.strip() else None


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def parse_keys(contents: list[bytes]) -> dict[bytes, Tenant]:
    """Parses a key file into tenants by the hash of their key. Raises ConfigError, which names the entry but no
    hash."""
    try:
        document = tomllib.loads(contents[0].decode())
    except (ValueError, RecursionError) as error:  # not TOML or UTF-8, a number too long, nested too deep
        raise ConfigError(f"api_keys: not TOML: {error}") from None
    entries = document.get("key")
    if set(document) != {"key"} or not isinstance(entries, list) or not entries:
        raise ConfigError("api_keys: the file must hold [[key]] tables and nothing else")
    tenants: dict[bytes, Tenant] = {}
    first: dict[str, Tenant] = {}
    for number, entry in enumerate(entries, 1):
        digest, tenant = _parse_entry(entry, f"api_keys: key {number}")
        if digest in tenants:
            raise ConfigError(f"api_keys: key {number} has the same sha256 as an earlier key")
        # Keys with the same name belong to one tenant and share its rate limits.
        limits = first.setdefault(tenant.name, tenant).limits
        if tenant.limits.per_minute != limits.per_minute:
            raise ConfigError(
                f"api_keys: key {number} ({tenant.name!r}) has different rate limits from an earlier key with the "
                "same name; keys with one name belong to one tenant and need the same limits"
            )
        tenants[digest] = replace(tenant, limits=limits)
    return tenants


def _parse_entry(entry: Any, where: str) -> tuple[bytes, Tenant]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise ConfigError(f"{where} has no name")
    where = f"{where} ({entry['name']!r})"
    if unknown := sorted(set(entry) - _FIELDS):
        raise ConfigError(f"{where}: unknown field {', '.join(unknown)}; fields are {', '.join(sorted(_FIELDS))}")
    try:
        digest = bytes.fromhex(entry["sha256"])
    except (KeyError, TypeError, ValueError):
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits")
    scopes = entry.get("scopes", sorted(DEFAULT_SCOPES))
    if not isinstance(scopes, list) or not scopes or any(scope not in SCOPES for scope in scopes):
        raise ConfigError(f"{where}: scopes must be a list with one or more of {', '.join(SCOPES)}")
    limits: dict[str, float] = {}
    for kind in RateLimits.KINDS:
        if (raw := entry.get(f"{kind}_per_minute")) is not None:
            try:
                limits[kind] = parse_size(raw)
            except ValueError:
                limits[kind] = 0
            if limits[kind] <= 0:
                raise ConfigError(f"{where}: {kind}_per_minute must be a number above 0, got {raw!r}")
    salt = hashlib.sha256(b"saccade tenant\0" + entry["name"].encode()).digest()
    return digest, Tenant(entry["name"], salt, frozenset(scopes), RateLimits(limits))


def watch_keys(path: str, frontends: int = 1) -> Watched[dict[bytes, Tenant]]:
    """The key file at `path`, read again when it changes (which resets what rate limits have counted). Raises
    ConfigError if it cannot be read the first time, or if a key has a rate limit and there are several `frontends`,
    each of which would count its own calls only."""

    def parse(contents: list[bytes]) -> dict[bytes, Tenant]:
        tenants = parse_keys(contents)
        limited = [tenant.name for tenant in tenants.values() if tenant.limits.limited]
        if limited and frontends > 1:
            raise ConfigError(
                f"api_keys: {limited[0]!r} has a rate limit, which each of {frontends} frontends would count "
                "separately; remove the rate limits, or use frontends 1"
            )
        return tenants

    return Watched("api_keys", [path], parse)
