"""Options that have no effect in a server's role are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from service.commands.plan import plan
from service.common.config import ServerOptions
from service.common.roles import ENCODER_IGNORES, ENCODER_USES, IGNORED, warn_of_unused
from service.servers.exposure import channel_options
from service.servers.preflight import check_options


def test_every_option_has_an_effect_in_an_encoder_or_is_listed_as_without_one() -> None:
    names = {field.name for field in fields(ServerOptions)}
    assert names == ENCODER_USES | ENCODER_IGNORES and not ENCODER_USES & ENCODER_IGNORES
    assert IGNORED.keys() == set(next(f for f in fields(ServerOptions) if f.name == "role").metadata["choices"])
    assert all(names >= ignored for ignored in IGNORED.values())


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"role": "encoder", "max_seqs": 5, "batch_jobs": 2, "warmup": False}, "max_seqs, warmup, batch_jobs"),
        ({"role": "decoder", "encoders": ("a:1",), "max_images": 2, "max_decoders": 9}, "max_images, max_decoders"),
        ({"encoder_ca": "ca.pem", "handoff_bytes": 2**20}, "encoder_ca"),
        ({"role": "encoder", "max_decoders": 9, "token_budgets": (64,), "max_seqs": 32}, ""),
        ({"max_seqs": 5}, ""),
    ],
)
def test_options_without_an_effect_in_a_role_are_named(
    options: dict[str, Any], unused: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unused(ServerOptions(**options))
    words = f"without effect with --role {options.get('role', 'all')}: {unused}"
    assert [record.getMessage() for record in caplog.records] == ([words] if unused else [])


@pytest.mark.parametrize(
    ("options", "where", "unused"),
    [
        ({"draft_tokens": 5}, "without --speculative or --forced-tokens on", "draft_tokens"),
        ({"state_cache": "none", "checkpoint_bytes": 9}, "with --state-cache none", "checkpoint_bytes"),
        ({"memory_bytes": 2**20, "memory_share": 0.3}, "with --memory-bytes", "memory_share"),
        ({"graphs": "off", "max_capture": 64}, "with --graphs off", "max_capture"),
        ({"native": "off", "instruction_set": "avx2"}, "with --native off", "instruction_set"),
        ({"encoder_lease": 3.0}, "without --encoder-process", "encoder_lease"),
        ({"max_tenant_calls": 3}, "without --api-keys", "max_tenant_calls"),
        ({"frontends": 2, "batch_jobs": 3}, "with several frontends", "batch_jobs"),
        ({"image_url_ca": "ca.pem"}, "without --image-url-hosts", "image_url_ca"),
        ({"http_host": "0.0.0.0", "http_file_dir": "files"}, "without --http-port", "http_file_dir"),
        ({"draft_tokens": 5, "forced_tokens": "on"}, "", ""),
        ({"memory_share": 0.3, "max_capture": 64, "encoder_process": True, "encoder_lease": 3.0}, "", ""),
    ],
)
def test_options_without_an_effect_beside_others_are_named(
    options: dict[str, Any], where: str, unused: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unused(ServerOptions(**options))
    words = [f"without effect {where}: {unused}"] if unused else []
    assert [record.getMessage() for record in caplog.records] == words


@pytest.mark.parametrize("command", [check_options, plan])
def test_serve_and_plan_name_the_options_of_other_roles(
    command: Callable[[ServerOptions], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """An encoder has no frontend processes, however many there would be."""
    command(ServerOptions(role="encoder", port=0, max_seqs=5, frontends=10**6))
    assert "without effect with --role encoder: max_seqs, frontends" in caplog.text


def test_an_encoder_shares_its_port_with_no_other_server() -> None:
    assert dict(channel_options(ServerOptions(role="encoder", frontends=2)))["grpc.so_reuseport"] == 0
