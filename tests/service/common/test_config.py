"""Options: their sources, their order, and the errors of each."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from saccade._core.targets import GRPC_SCHEMES
from service.commands.cli import main
from service.common.config import (
    ConfigError,
    EngineOptions,
    HttpFrontOptions,
    ServerOptions,
)
from service.common.settings import add_arguments, from_keywords, parse_size, parse_value, resolve
from service.common.tls import read_pem
from service.common.watch import Watched


def parse(*argv: str, env: dict[str, str] | None = None) -> ServerOptions:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, ServerOptions)
    return resolve(ServerOptions, vars(parser.parse_args(list(argv))), env or {})


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "saccade.toml"
    file.write_text('max_seqs = 3\nport = 7\nmax_queue = 9\nhandoff_bytes = "2Mi"\ntoken_budgets = [64, 256]\n')
    options = parse("--config", str(file), "--max-seqs", "1", env={"SACCADE_MAX_SEQS": "2", "SACCADE_PORT": "8"})
    assert (options.max_seqs, options.port, options.max_queue, options.max_inflight_bytes) == (1, 8, 9, 2**29)
    assert options.handoff_bytes == 2 * 2**20 and options.token_budgets == (64, 256)


def test_flags_lists_and_sizes_on_the_command_line() -> None:
    options = parse("some/model", "--insecure", "--token-budgets", "64,128", "--memory-bytes", "1.5Gi", "--grace", "0")
    assert options.model == "some/model" and options.insecure and options.token_budgets == (64, 128)
    assert options.memory_bytes == 3 * 2**29 and options.grace == 0


def test_lists_may_have_spaces_after_commas() -> None:
    options = parse("--role", "decoder", "--encoders", "a:1, b:2", env={"SACCADE_TOKEN_BUDGETS": "64, 128,"})
    assert options.encoders == ("a:1", "b:2") and options.token_budgets == (64, 128)


def test_names_that_requests_have_are_allowed() -> None:
    hosts, origins = "*,A.example,[::1],::1,10.0.0.1", "*,null,http://a:8080,http://[::1]:81,app://."
    options = parse("--http-allowed-hosts", hosts, "--http-cors-origins", origins)
    assert options.http_allowed_hosts == tuple(hosts.split(",")) and options.http_cors_origins == tuple(
        origins.split(",")
    )


def test_an_ipv6_address_may_be_in_brackets() -> None:
    for host in ("::1", "[::1]"):
        options = parse("--host", host, "--metrics-host", host)
        assert (options.host, options.metrics_host) == ("::1", "::1")


def test_what_is_on_unless_told_has_a_flag_that_turns_it_off() -> None:
    assert parse().warmup and not parse("--no-warmup").warmup
    assert not parse("--no-warmup", env={"SACCADE_WARMUP": "1"}).warmup


def test_the_former_name_of_frontends_is_still_understood() -> None:
    assert parse("--fronts", "2").frontends == parse("--frontends", "2").frontends == 2


def test_help_says_what_each_option_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = {}
    for command in ("serve", "plan"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        told[command] = capsys.readouterr().out.partition("options:")[2]
    assert told["serve"] == told["plan"]
    for words in ("--host TEXT", "--max-image-bytes SIZE", "--encoders A,B", "--token-budgets N,N", "--port N "):
        assert words in told["serve"]


def test_an_unknown_option_is_named_without_the_list_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    for command, name in (("serve", "--max-sequences"), ("plan", "--max-seq"), ("http", "--por")):
        with pytest.raises(SystemExit, match="2"):
            main([command, name, "3"])
        usage, error, *rest = capsys.readouterr().err.splitlines()
        assert usage.startswith(f"usage: saccade {command} [options]") and rest == []
        assert error.startswith(f"saccade {command}: error: unrecognized arguments: {name}")


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--max-seqs", "0"], {}, "max_seqs: 0 is below the minimum of 1"),
        (["--threads", "100000"], {}, "threads: 100000 is above the maximum of 1024"),
        (
            ["--encoder-time-slice", "0.2", "--encoder-process"],
            {},
            "encoder_time_slice: 0.2 would not be used with --encoder-process",
        ),
        (
            ["--encoder-time-slice", "0.2", "--role", "encoder"],
            {},
            "encoder_time_slice: 0.2 would not be used by --role encoder",
        ),
        (["--max-connection-age-grace", "5"], {}, "max_connection_age_grace: 5 would not be used without"),
        (["--admin", "--api-keys", "keys.toml"], {}, "admin: it would not be used with api_keys"),
        (["--http-allowed-hosts", "a.example:80"], {}, "http_allowed_hosts: .* no host name; 'a.example' would work"),
        (["--http-allowed-hosts", "https://A.example/x"], {}, "is no host name; 'a.example' would work"),
        (["--http-allowed-hosts", "[::1]:80"], {}, "is no host name; '::1' would work"),
        (["--http-allowed-hosts", "["], {}, "is no host name; 'app.example.org' would work"),
        (["--http-cors-origins", "https://a.example/"], {}, "http_cors_origins: .* 'https://a.example' would work"),
        (["--http-cors-origins", "https://A.example:443"], {}, "no origin .* 'https://a.example' would work"),
        (["--http-cors-origins", "a.example"], {}, "no origin .* 'https://app.example.org' would work"),
        (["--grace", "nan"], {}, "grace: 'nan' is not a number"),
        (["--stall-timeout", "inf"], {}, "stall_timeout: 'inf' is not a number"),
        (["--handoff-bytes", "1e400k"], {}, "handoff_bytes: '1e400k' is not a number of bytes"),
        (["--handoff-bytes=-1k"], {}, "handoff_bytes: -1000 is below"),
        (["--handoff-bytes", "1kk"], {}, "handoff_bytes: '1kk' is not"),
        (["--grace", "-0.5"], {}, "grace: -0.5 is below the minimum of 0"),
        (["--role", "decoder"], {}, "encoders: --role decoder needs"),
        (["--encoders", "a:1"], {}, "encoders: a:1 would not be used by --role all"),
        (["--role", "decoder", "--encoders", "a:1,b"], {}, "encoders: 'b' is not HOST:PORT"),
        (["--role", "decoder", "--encoders", "a:1,a:1"], {}, "encoders: an address is listed twice"),
        (["--role", "encoder", "--encoder-process"], {}, "encoder_process: it would not be used by --role encoder"),
        (["--max-seqs", "many"], {}, "max_seqs: 'many' is not a whole number"),
        (["--dtype", "int3"], {}, "dtype: 'int3' is not one of float32, bfloat16"),
        (["--token-budgets", "64,0"], {}, "token_budgets: 0 is below"),
        (["--handoff-bytes", "lots"], {}, "handoff_bytes: 'lots' is not a number of bytes"),
        (["--max-image-pixels", "lots"], {}, "max_image_pixels: 'lots' is not a count, such as 64M"),
        ([], {"SACCADE_MAX_SEQ": "1"}, "SACCADE_MAX_SEQ: max_seq: no option has this name; did you mean max_seqs"),
        ([], {"SACCADE_XYZZY": "1"}, "xyzzy: no option has this name; `saccade serve --help` lists"),
        ([], {"SACCADE_MAX_SEQS": "x"}, "^environment variable SACCADE_MAX_SEQS: max_seqs: 'x' is not a whole number"),
        (["--port", "65536"], {}, "port: 65536 is above the maximum of 65535"),
        (["--metrics-port", "70000"], {}, "metrics_port: 70000 is above the maximum of 65535"),
        (["--http-port", "70000"], {}, "http_port: 70000 is above the maximum of 65535"),
        (["--device", "tpu"], {}, "device: 'tpu' is not 'cpu', 'cuda'"),
        (["--role", "decoder", "--encoders", "a:70000"], {}, "encoders: 'a:70000' is not HOST:PORT .* 1 to 65535"),
        (["--role", "decoder", "--encoders", ":1"], {}, "encoders: ':1' is not HOST:PORT"),
        (["--role", "decoder", "--encoders", "::1:50051"], {}, "encoders: '::1:50051' is an IPv6 .* without brackets"),
        ([], {"SACCADE_INSECURE": "perhaps"}, "insecure: 'perhaps' is not true or false"),
        (["--config", "/nonexistent.toml"], {}, "config file /nonexistent.toml"),
        (["--media-dir", ""], {}, "^media_dir: it is empty; give it a value, or leave it out"),
        ([], {"SACCADE_BATCH_DIR": ""}, "^environment variable SACCADE_BATCH_DIR: batch_dir: it is empty"),
    ],
)
def test_errors_name_the_option(argv: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv, env=env)


SECONDS = [
    pytest.param(options, spec.name, id=f"{options.__name__}.{spec.name}")
    for options in (ServerOptions, HttpFrontOptions)
    for spec in fields(options)
    if spec.metadata["help"].startswith("seconds")
]
REPORTED = (
    "max_images_per_request", "max_image_bytes", "max_image_pixels", "max_videos_per_request", "max_video_bytes",
    "max_video_frames", "max_video_file_frames", "max_video_pixels",
)  # fmt: skip
"""Limits that messages to clients have, in fields of 32 or 64 bits."""


@pytest.mark.parametrize(("options", "name"), SECONDS)
def test_a_time_that_nothing_could_wait_for_is_refused(options: type, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: 1e\+300 is above the maximum of \d+$"):
        parse_value(options, name, "1e300")


@pytest.mark.parametrize("name", [*REPORTED, "max_queue", "max_seqs", "max_len", "max_batched_tokens"])
def test_a_number_that_nothing_could_hold_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: {2**64} is above the maximum of \d+$"):
        parse_value(ServerOptions, name, str(2**64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_seq = 1", "toml: max_seq: no option has this name; did you mean max_seqs"),
        ("max_seqs = ", "config file"),
        (f"max_seqs = {'9' * 5000}", "config file"),
        (f"max_seqs = {'[' * 5000}", "config file"),
        ("max_seqs = 0", "^config file .*toml: max_seqs: 0 is below the minimum of 1"),
        ("token_budgets = [64.5, 256]", r"token_budgets: \[64.5, 256\] is not a list of whole numbers"),
        ('media_dir = ["uploads"]', r"media_dir: \['uploads'\] is not text"),
        ("api_keys = true", "api_keys: True is not text"),
        ("encoders = [1]", r"encoders: \[1\] is not a list"),
        ("grace = true", "grace: True is not a number"),
    ],
)  # fmt: skip
def test_errors_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "saccade.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(file))


@pytest.mark.parametrize("address", ["nowhere", "host:70000", "host:x", ":1"])
def test_servers_of_the_http_server_are_hosts_and_ports(address: str) -> None:
    with pytest.raises(ConfigError, match=f"servers: '{address}' is not HOST:PORT"):
        HttpFrontOptions(servers=(address,))


def test_servers_of_the_http_server_may_be_targets_of_grpc() -> None:
    for address in (*(f"{scheme}name" for scheme in GRPC_SCHEMES), "10.0.0.5:50051"):
        assert HttpFrontOptions(servers=(address,)).servers == (address,)


def test_the_sdks_own_variables_are_not_options() -> None:
    assert parse(env={"SACCADE_API_KEY": "x", "SACCADE_SERVER": "y", "OTHER": "z"}) == ServerOptions()


INJECTED = {
    "SACCADE_SERVICE_HOST": "10.96.1.2",
    "SACCADE_SERVICE_PORT": "50051",
    "SACCADE_SERVICE_PORT_GRPC": "50051",
    "SACCADE_PORT": "tcp://10.96.1.2:50051",
    "SACCADE_PORT_50051_TCP": "tcp://10.96.1.2:50051",
    "SACCADE_PORT_50051_TCP_PROTO": "tcp",
    "SACCADE_PORT_50051_TCP_PORT": "50051",
    "SACCADE_PORT_50051_TCP_ADDR": "10.96.1.2",
    "SACCADE_PORT_53_UDP_ADDR": "10.96.1.2",
    "SACCADE_METRICS_SERVICE_HOST": "10.96.1.3",
    "SACCADE_METRICS_SERVICE_PORT_HTTP_METRICS": "9100",
    "SACCADE_METRICS_PORT": "tcp://[fd00::1]:9100",
    "SACCADE_METRICS_PORT_9100_TCP_ADDR": "fd00::1",
}


def test_what_kubernetes_injects_for_a_service_of_this_name_is_not_ours() -> None:
    assert parse(env=INJECTED) == ServerOptions()
    # other settings still apply, and a misspelled one is still an error
    assert parse(env={**INJECTED, "SACCADE_PORT": "8", "SACCADE_METRICS_PORT": "9"}).port == 8
    for variable, value in (
        ("SACCADE_PORT", "tcp://somewhere"), ("SACCADE_PORT", "http://10.0.0.1:80"), ("SACCADE_HOSTS", "10.0.0.1"),
        ("SACCADE_SERVICE", "10.0.0.1"), ("SACCADE_PORT_TCP", "1"), ("SACCADE_MAX_QUEUE", "tcp://10.0.0.1:80"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=variable.removeprefix("SACCADE_").lower() + "|" + variable):
            parse(env={**INJECTED, variable: value})


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "saccade.toml"
    file.write_bytes(b'model = "\xe9"\n')
    with pytest.raises(ConfigError, match=f"^config file {file}: 'utf-8' codec can't decode"):
        parse("--config", str(file))


def test_a_file_without_an_end_is_not_read() -> None:
    """By any option: those of TLS and API keys are read in the same way."""
    with pytest.raises(ConfigError, match="^config file /dev/zero: it has more than 16777216 bytes"):
        parse("--config", "/dev/zero")
    with pytest.raises(ConfigError, match="api_keys: cannot read /dev/zero: it has more than 16777216 bytes"):
        Watched("api_keys", ["/dev/zero"], lambda contents: contents)
    with pytest.raises(ConfigError, match="tls_key: /dev/zero: it has more than 16777216 bytes"):
        read_pem("/dev/zero", "tls_key")


def test_keywords_of_the_local_client() -> None:
    options: Any = from_keywords(EngineOptions, {"model": "demo", "dtype": None, "max_seqs": 4})
    assert options == EngineOptions(max_seqs=4)
    assert from_keywords(EngineOptions, {"model": Path("/models/a")}) == EngineOptions(model="/models/a")
    with pytest.raises(ConfigError, match="maxseqs: no option has this name; did you mean max_seqs"):
        from_keywords(EngineOptions, {"maxseqs": 4})


@pytest.mark.parametrize(
    ("text", "value"),
    [("64MiB", 64 * 2**20), ("1k", 1000), (17, 17), ("2 G", 2 * 10**9), ("1.5k", 1500), (str(2**53 + 1), 2**53 + 1)],
)
def test_sizes(text: Any, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("raw", "words"), [("true", "max_seqs: True"), ("1.0", "max_seqs: 1.0"), ('"1.5"', "max_seqs: '1.5'")]
)
def test_a_whole_number_is_one_in_toml_too(tmp_path: Path, raw: str, words: str) -> None:
    file = tmp_path / "saccade.toml"
    file.write_text(f"max_seqs = {raw}")
    with pytest.raises(ConfigError, match=f"{words} is not a whole number"):
        parse("--config", str(file))


def test_the_file_may_be_named_in_the_environment_and_the_least_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "saccade.toml"
    file.write_text('max_seqs = 1\ngrace = 0\nwarmup = "off"\nencoders = []\n')
    options = parse(env={"SACCADE_CONFIG": str(file)})
    assert (options.max_seqs, options.grace, options.warmup) == (1, 0.0, False)
    # the engine's options alone, where variables of the server are set too
    assert resolve(EngineOptions, {}, {"SACCADE_MAX_QUEUE": "3", "SACCADE_MAX_SEQS": "2"}) == EngineOptions(max_seqs=2)
    assert resolve(ServerOptions, {"max_queue": None, "unknown": 1}, {"SACCADE_MAX_QUEUE": "3"}).max_queue == 3
