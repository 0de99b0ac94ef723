"""Wrong uses of the small commands: the exit code is 2, and one line names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.commands.cli import main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["key", ""], "NAME: ''", id="key-empty"),
        pytest.param(["key", " "], "NAME: ' '", id="key-blank"),
        pytest.param(["key", 'a"b'], "NAME: 'a\"b'", id="key-quote"),
        pytest.param(["probe", "nowhere"], "HOST:PORT: 'nowhere' is not HOST:PORT", id="probe-address"),
        pytest.param(["probe", "host:99999"], "with a port from 1 to 65535", id="probe-port"),
        pytest.param(
            ["probe", "host:1", "--timeout", "-1"],
            "--timeout: expected more than 0 and at most 1000000000 seconds, got -1",
            id="probe-timeout",
        ),
        pytest.param(["probe", "host:1", "--timeout", "nan"], "got nan", id="probe-timeout-nan"),
        pytest.param(["probe", "host:1", "--timeout", "1e10"], "at most 1000000000", id="probe-timeout-huge"),
        pytest.param(["probe", "host:1", "--ca", "no.pem"], "--ca: no.pem: No such file", id="probe-ca"),
        pytest.param(["probe", "host:1", "--ca", __file__], "no certificate in PEM format", id="probe-ca-content"),
        pytest.param(["probe", "host:1", "--server-name", "a"], "--server-name: has no effect", id="probe-name"),
        pytest.param(["probe", "host:1", "--cert", "c.pem"], "--cert: has no effect", id="probe-cert"),
        pytest.param(["http", "--servers", "nowhere"], "servers: 'nowhere' is not HOST:PORT", id="http-servers"),
    ],
)
def test_the_message_names_what_is_wrong(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"saccade {argv[0]}: ") and message in said and said.count("\n") == 1


def test_a_folder_to_write_is_not_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert main(["quantize", "demo", str(file), "--weights", "int8"]) == 2
    assert "OUT: " in (said := capsys.readouterr().err) and "is a file" in said


def test_probe_takes_other_targets_of_grpc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"unix:{tmp_path}/none.sock"
    assert main(["probe", target]) == 1
    assert capsys.readouterr().err.startswith(f"{target}: UNAVAILABLE")
