"""API keys: which callers are admitted, with which rights, and errors of wrong key files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from service.common import errors
from service.common.auth import Guard, Tenant, parse_keys, scope_of, watch_keys
from service.common.config import ConfigError

GENERATE = "/saccade.v1.InferenceService/Generate"
DRAIN = "/saccade.v1.AdminService/Drain"


def entry(name: str, key: str, **fields: object) -> str:
    extra = "".join(f"{k} = {v!r}\n" for k, v in fields.items())
    return f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{extra}'


def admit(guard: Guard, method: str, metadata: Mapping[str, str | bytes]) -> Tenant:
    tenant = guard.identify(metadata)
    guard.admit(method, tenant)
    return tenant


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    path = tmp_path / "keys.toml"
    path.write_text(
        entry("one", "sk-1") + entry("boss", "sk-2", scopes=["admin"]) + entry("slow", "sk-3", requests_per_minute=2)
    )
    return Guard(watch_keys(str(path)))


@pytest.mark.parametrize(
    "metadata", [{"authorization": "Bearer sk-1"}, {"authorization": "bearer  sk-1"}, {"x-api-key": "sk-1"}]
)
def test_a_key_is_a_tenant(guard: Guard, metadata: dict[str, str]) -> None:
    tenant = admit(guard, GENERATE, metadata)
    assert tenant.name == "one" and len(tenant.salt) == 32


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"authorization": "sk-1"},
        {"authorization": "Basic sk-1"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sk-\xff"},
        {"x-api-key": "sk-11"},
    ],
)
def test_others_are_not(guard: Guard, metadata: dict[str, str]) -> None:
    with pytest.raises(errors.Unauthenticated):
        admit(guard, GENERATE, metadata)


def test_scopes(guard: Guard) -> None:
    assert scope_of(DRAIN) == "admin" and scope_of("/saccade.v1.BatchService/CreateBatch") == "batch"
    assert scope_of("/inference.GRPCInferenceService/ModelInfer") == "inference"
    admit(guard, DRAIN, {"x-api-key": "sk-2"})
    with pytest.raises(errors.PermissionDenied, match="admin"):
        admit(guard, DRAIN, {"x-api-key": "sk-1"})
    with pytest.raises(errors.PermissionDenied, match="inference"):
        admit(guard, GENERATE, {"x-api-key": "sk-2"})
    with pytest.raises(errors.PermissionDenied):
        admit(Guard(None), DRAIN, {})
    assert admit(Guard(None, admin=True), DRAIN, {}).salt == b""


def test_a_caller_without_the_scope_is_told_how_to_get_it(guard: Guard) -> None:
    with pytest.raises(errors.PermissionDenied, match="--admin"):
        admit(Guard(None), DRAIN, {})
    with pytest.raises(
        errors.PermissionDenied, match="'one' lacks; add it to `scopes` of the key in the server's --api-keys"
    ):
        admit(guard, DRAIN, {"x-api-key": "sk-1"})


def test_a_tenant_by_its_name_has_a_key_with_the_scope(tmp_path: Path) -> None:
    keys = [("a", "1", "inference"), ("a", "2", "batch"), ("b", "3", "inference")]
    text = "".join(entry(name, key, scopes=[scope]) for name, key, scope in keys)
    (tmp_path / "keys.toml").write_text(text)
    guard = Guard(watch_keys(str(tmp_path / "keys.toml")))
    found = guard.named("a", "batch")
    assert found is not None and found.scopes == {"batch"}
    assert guard.named("b", "batch") is None and guard.named("c", "batch") is None
    assert Guard(None).named("", "batch") is not None and Guard(None).named("a", "batch") is None


def test_the_rate_is_the_keys_own(guard: Guard) -> None:
    for _ in range(2):
        admit(guard, GENERATE, {"x-api-key": "sk-3"})
    with pytest.raises(errors.ResourceExhausted):
        admit(guard, GENERATE, {"x-api-key": "sk-3"})
    admit(guard, GENERATE, {"x-api-key": "sk-1"})


def test_what_a_key_may_without_saying_so(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("plain", "k"))
    guard, key = Guard(watch_keys(str(tmp_path / "keys.toml"))), {"x-api-key": "k"}
    batch, attach = "/saccade.v1.BatchService/CreateBatch", "/saccade.v1.EncoderService/Attach"
    for method in (GENERATE, batch, "/saccade.v1.MediaService/GetMedia", "/saccade.v1.ModelService/GetModel"):
        assert admit(guard, method, key).name == "plain"
    for method in (DRAIN, attach):
        with pytest.raises(errors.PermissionDenied):
            admit(guard, method, key)
    anyone = Guard(None)
    assert admit(anyone, attach, {}).scopes >= {"inference", "batch", "encoder"}
    assert admit(anyone, batch, {"x-api-key": "whatever"}).name == ""
    assert guard.named("plain", "batch") and not guard.named("plain", "admin") and not guard.named("", "batch")


def test_a_caller_with_a_wrong_token_is_not_asked_for_another(guard: Guard) -> None:
    with pytest.raises(errors.Unauthenticated):
        admit(guard, GENERATE, {"authorization": "Bearer nonsense", "x-api-key": "sk-1"})
    assert admit(guard, GENERATE, {"authorization": b"Bearer sk-1", "x-api-key": "nonsense"}).name == "one"


def test_a_refused_call_costs_nothing_of_the_rate(guard: Guard) -> None:
    for _ in range(5):
        with pytest.raises(errors.PermissionDenied):
            admit(guard, DRAIN, {"x-api-key": "sk-3"})
    admit(guard, GENERATE, {"x-api-key": "sk-3"})


def test_tenants_have_salts_of_their_own(tmp_path: Path) -> None:
    text = entry("a", "1") + entry("a", "2", scopes=["admin"]) + entry("b", "3")
    one, same, other = parse_keys([text.encode()]).values()
    assert one.salt == same.salt != other.salt and len(other.salt) == 32
    assert one.scopes == {"inference", "batch"} and same.scopes == {"admin"}


def test_keys_of_one_name_share_its_rate(tmp_path: Path) -> None:
    """A second key of the same name, as during a rotation, does not add to the rate."""
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(entry("a", key, requests_per_minute=3) for key in ("old", "new")) + entry("b", "b"))
    guard = Guard(watch_keys(str(keys)))
    for key in ("old", "new", "old"):
        admit(guard, GENERATE, {"x-api-key": key})
    for key in ("old", "new"):
        with pytest.raises(errors.ResourceExhausted):
            admit(guard, GENERATE, {"x-api-key": key})
    admit(guard, GENERATE, {"x-api-key": "b"})
    for other in ({"requests_per_minute": 4}, {"requests_per_minute": 3, "bytes_per_minute": 9}, {}):
        with pytest.raises(ConfigError, match="key 2 .'a'. has different rate limits"):
            parse_keys([(entry("a", "old", requests_per_minute=3) + entry("a", "new", **other)).encode()])


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("one", "sk-1"))
    guard = Guard(watch_keys(str(path)))
    path.write_text(entry("two", "sk-2-secret"))
    assert admit(guard, GENERATE, {"x-api-key": "sk-2-secret"}).name == "two"
    with pytest.raises(errors.Unauthenticated):
        admit(guard, GENERATE, {"x-api-key": "sk-1"})
    path.write_text("[[key]]\nname = ")
    for _ in range(3):
        assert admit(guard, GENERATE, {"x-api-key": "sk-2-secret"}).name == "two"
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    os.unlink(path)
    assert admit(guard, GENERATE, {"x-api-key": "sk-2-secret"}).name == "two"
    assert "secret" not in caplog.text and hashlib.sha256(b"sk-2-secret").hexdigest() not in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "[[key]]"),
        ("other = 1", "[[key]]"),
        ("[[key]]\nsha256 = 'ab'", "no name"),
        ("[[key]]\nname = 'x'", "64 hexadecimal"),
        ("[[key]]\nname = 'x'\nsha256 = 'zz'", "64 hexadecimal"),
        (entry("x", "k", scopes=["root"]), "inference, batch, admin"),
        (entry("x", "k", colour="red"), "colour"),
        (entry("x", "k", scopes=[]), "inference, batch, admin"),
        (entry("x", "k", scopes="inference"), "inference, batch, admin"),
        (entry("x", "k", scopes=[["admin"]]), "inference, batch, admin"),
        (entry("", "k"), "no name"),
        (entry("x", "k", requests_per_minute=0), "above 0"),
        (entry("x", "k", bytes_per_minute="1e400k"), "above 0"),
        (entry("x", "k", bytes_per_minute="1e308g"), "above 0"),
        (entry("x", "k", requests_per_minute=10**400), "above 0"),
        (f"key = {'9' * 5000}", "not TOML"),
        (f"key = {'[' * 5000}", "not TOML"),
        (entry("x", "k") + "[other]\na = 1\n", "nothing else"),
        (entry("x", "k", tokens_per_minute=-1), "above 0"),
        (entry("x", "k") + entry("y", "k"), "key 2 has the same sha256 as an earlier key"),
    ],
)
def test_a_wrong_key_file_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_keys([text.encode()])
    assert message in str(error.value)


def test_several_frontends_take_no_rates_at_the_start_or_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    entry = f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\n'
    path.write_text(entry)
    watched = watch_keys(str(path), frontends=2)
    before = watched.current()
    path.write_text(f"{entry}requests_per_minute = 5\n")
    assert watched.current() is before, "each frontend would allow five"
    assert "'a' has a rate limit, which each of 2 frontends would count separately" in caplog.text
    with pytest.raises(ConfigError, match="rate limit"):
        watch_keys(str(path), frontends=2)
    assert watch_keys(str(path)).current()


def test_the_command_makes_a_pair_that_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service", "key", "team"], capture_output=True, text=True, check=True,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    key = done.stderr.strip().rpartition(" ")[2]
    assert key.startswith("sk-") and key not in done.stdout
    tenants = parse_keys([done.stdout.encode()])
    assert tenants[hashlib.sha256(key.encode()).digest()].name == "team"
