"""The files under deploy/ are consistent: what they name exists, and their options are accepted by the server."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import RunningServer

from service.commands.probe import main as probe
from service.common.config import HttpFrontOptions, ServerOptions
from service.common.errors import Code
from service.common.settings import ENV_PREFIX, from_keywords, resolve
from service.servers.frontends import END_SECONDS
from service.servers.health import LIVENESS

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
PROBE_SECONDS = 2.0
"""For which `saccade probe` waits by default."""
SERVE_CONFIGS = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))
SYSTEMD = ROOT / "deploy" / "systemd"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"


def instructions() -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", "", "\n".join(x for x in DOCKERFILE.splitlines() if not x.startswith("#")))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line.strip()]


def test_the_dockerfile_copies_what_there_is_and_sets_options_that_there_are() -> None:
    seen = {name for name, _ in instructions()}
    assert {"FROM", "COPY", "RUN", "USER", "ENTRYPOINT", "EXPOSE", "ENV", "ARG", "WORKDIR", "VOLUME", "CMD"} >= seen
    copied: set[str] = set()
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest:
            *sources, _ = rest.split()
            copied |= set(sources)
            for source in sources:
                assert (ROOT / source).exists(), source
        if name == "ENV":
            values = dict(part.split("=", 1) for part in shlex.split(rest))
            options = resolve(ServerOptions, {}, {k: v for k, v in values.items() if k.startswith(ENV_PREFIX)})
            assert options.host == options.http_host == options.metrics_host == "0.0.0.0", "published ports reach it"
            assert options.metrics_port == 9100 and options.log_json
            assert options.model == "/models/model", "arguments of `docker run` would replace a CMD that names it"
    ignored = (ROOT / ".dockerignore").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    read = {"pyproject.toml", "setup.py", "constraints.txt", project["project"]["readme"], "LICENSE"}
    assert packages | read | {"saccade"} <= copied and not copied & set(ignored)


def test_the_image_with_cuda_can_compile_kernels_and_keep_them() -> None:
    """Triton calls gcc when a kernel is first used, also in the final image; the root file system may be read-only."""
    stages = [index for index, (name, _) in enumerate(instructions()) if name == "FROM"]
    final = instructions()[stages[-1] :]
    (installed,) = [rest for name, rest in final if name == "RUN" and "apt-get install" in rest]
    assert ("ARG", "TORCH=cpu") in final and installed.startswith('if [ "$TORCH" = cuda ]')
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    (environment,) = [shlex.split(rest) for name, rest in final if name == "ENV"]
    values = dict(part.split("=", 1) for part in environment)
    assert {name: Path(values[name]).parts[:2] for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR")} == {
        "XDG_CACHE_HOME": ("/", "data"),
        "TRITON_CACHE_DIR": ("/", "data"),
    }


def accepted(given: dict[str, Any], environment: dict[str, str] | None = None) -> ServerOptions:
    """`resolve` alone ignores names that no option has."""
    assert given.keys() <= {field.name for field in fields(ServerOptions)}
    return resolve(ServerOptions, given, environment or {})


def documents() -> list[tuple[str, Any]]:
    return [(path.name, document) for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_together(path: Path) -> None:
    parsed = list(yaml.safe_load_all(path.read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(document) for document in parsed)
    workloads = [d for d in parsed if d["kind"] in ("Deployment", "StatefulSet")]
    services = [d for d in parsed if d["kind"] == "Service"]
    assert workloads or not services
    for workload in workloads:
        pod = workload["spec"]["template"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        names = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= names
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"grpc": 50051, "metrics": 9100}
        scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(ports["metrics"])}
        assert pod["metadata"]["annotations"] == scraped, "a number of replicas may follow a metric of these pods"
        arguments = _options(container["args"])
        options = accepted(arguments)
        program, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "sleep" and int(pause) > 0, "new calls arrive until clients know that the pod stops"
        assert int(pause) + options.grace + END_SECONDS < pod["spec"]["terminationGracePeriodSeconds"]
        assert options.insecure or (options.tls_cert and options.api_keys)
        assert options.max_connection_age, "clients of a headless service would never see a pod that was added"
        assert pod["spec"]["enableServiceLinks"] is False
        asked = {}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            check = container[kind]
            if "grpc" in check:
                assert check["grpc"]["port"] == ports["grpc"] and options.tls_cert is None
                asked[kind] = check["grpc"].get("service", "")
            else:
                command = check["exec"]["command"]
                assert command[:4] == ["python", "-m", "service", "probe"]
                assert check["timeoutSeconds"] > 2 * PROBE_SECONDS, "Kubernetes' default is one second"
                asked[kind] = command[command.index("--service") + 1] if "--service" in command else ""
        assert asked["livenessProbe"] == LIVENESS, "a drain would be a reason to kill the pod"
        assert LIVENESS not in (asked["readinessProbe"], asked["startupProbe"])
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in workloads]
    for service in services:
        assert any(service["spec"]["selector"].items() <= pod.items() for pod in labels)


def test_the_names_between_manifests_fit() -> None:
    """The header that the client sends, and the service that the gateway calls."""
    from saccade._core.affinity import HEADER

    gateway = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "gateway-api.yaml").read_text()))
    policy = next(d for d in gateway if d["kind"] == "BackendTrafficPolicy")
    assert policy["spec"]["loadBalancer"]["consistentHash"]["header"]["name"] == HEADER
    backend = next(d for d in gateway if d["kind"] == "GRPCRoute")["spec"]["rules"][0]["backendRefs"][0]
    replicas = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "replicas.yaml").read_text()))
    service = next(d for d in replicas if d["kind"] == "Service")
    assert backend == {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}


def test_replicas_follow_a_metric_that_there_is_and_are_removed_slowly() -> None:
    """KEDA's `cooldownPeriod` only applies when it scales to zero: https://keda.sh/docs/latest/reference/scaledobject-spec"""
    replicas = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "replicas.yaml").read_text()))
    scaled = next(d for d in replicas if d["kind"] == "ScaledObject")["spec"]
    (trigger,) = scaled["triggers"]
    (metric,) = re.findall(r"saccade_\w+", trigger["metadata"]["query"])
    assert f"| `{metric}` |" in (ROOT / "docs" / "metrics.md").read_text()
    assert scaled["minReplicaCount"] >= 1 and "cooldownPeriod" not in scaled
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert 300 < behavior["scaleDown"]["stabilizationWindowSeconds"] <= 3600, "Kubernetes' default, and its limit"


def test_encoders_and_decoders_scale_apart() -> None:
    """Decoders name the pods of encoders, more than there are at first; an encoder takes all decoders there may be."""
    roles = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "roles.yaml").read_text()))
    encoder = next(d for d in roles if d["kind"] == "StatefulSet")
    decoder = next(d for d in roles if d["kind"] == "Deployment")
    encoders, decoders = (
        accepted(_options(d["spec"]["template"]["spec"]["containers"][0]["args"])) for d in (encoder, decoder)
    )
    assert (encoders.role, decoders.role, encoders.model) == ("encoder", "decoder", decoders.model)
    name, service = encoder["metadata"]["name"], encoder["spec"]["serviceName"]
    assert service in [d["metadata"]["name"] for d in roles if d["kind"] == "Service"]
    assert decoders.encoders == tuple(f"{name}-{i}.{service}:{encoders.port}" for i in range(len(decoders.encoders)))
    assert encoder["spec"]["replicas"] < len(decoders.encoders)
    surge = -(-decoder["spec"]["replicas"] // 4)  # a rolling update adds a quarter by default
    assert decoder["spec"]["replicas"] + surge <= encoders.max_decoders
    largest = 8192 * 4 * 3 * 16 * 16 * 2 * 2  # Qwen3.5: tokens, patches, two frames of 16 x 16 pixels, bfloat16
    assert encoders.max_inflight_bytes // encoders.max_decoders >= largest
    (application,) = yaml.safe_load((ROOT / "deploy" / "ray" / "decoders.yaml").read_text())["applications"]
    arguments = application["args"]
    served = accepted({"model": arguments["model"], **arguments["options"]})
    assert (served.role, served.encoders, served.model) == ("decoder", decoders.encoders, encoders.model)
    # replaced replicas finish their streams beside new ones
    assert 2 * arguments["deployment"]["autoscaling_config"]["max_replicas"] <= encoders.max_decoders


@pytest.mark.parametrize("path", SERVE_CONFIGS, ids=lambda path: path.stem)
def test_the_application_of_ray_serve_names_what_there_is(path: Path) -> None:
    import importlib

    config = yaml.safe_load(path.read_text())
    for name in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"def {function}(" in source
    accepted({"model": application["args"]["model"], **application["args"]["options"]})
    from_keywords(HttpFrontOptions, application["args"]["http"])


def test_the_compose_file_names_options_that_there_are() -> None:
    (service,) = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"].values()
    environment = next(shlex.split(rest) for name, rest in instructions() if name == "ENV" and ENV_PREFIX in rest)
    values = {k: v for k, v in (part.split("=", 1) for part in environment) if k.startswith(ENV_PREFIX)}
    options = accepted(_options([values["SACCADE_MODEL"], *service["command"]]), values)
    assert options.insecure and options.model == service["volumes"][0].split(":")[-2]
    published = [port.rpartition(":") for port in service["ports"]]
    assert [int(inside) for _, _, inside in published] == [options.port, options.http_port, options.metrics_port]
    assert all(outside.startswith("127.0.0.1:") for outside, _, _ in published), "other machines reach it without a key"
    assert seconds(service["stop_grace_period"]) > options.grace + END_SECONDS
    assert service["healthcheck"]["test"] == ["CMD", "saccade", "probe", f"127.0.0.1:{options.port}"]
    assert seconds(service["healthcheck"]["timeout"]) > 2 * PROBE_SECONDS
    assert seconds(service["healthcheck"]["start_period"]) >= options.load_timeout


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(SYSTEMD / "saccade.service")
    return parser["Service"]


def test_the_unit_and_its_options_fit_together() -> None:
    service = unit()
    program, command, flag, path = service["ExecStart"].split()
    assert (Path(program).name, command, flag, Path(path).name) == ("saccade", "serve", "--config", "server.toml")
    options = accepted(tomllib.loads((SYSTEMD / "server.toml").read_text()))
    assert int(service["TimeoutStopSec"]) > options.grace + END_SECONDS
    for folder in (options.media_dir, options.batch_dir, options.http_file_dir):
        assert folder and Path(folder).parent == Path("/var/lib") / service["StateDirectory"]
    caches = dict(part.split("=", 1) for part in service["Environment"].split())
    assert all(Path(f"/var/cache/{service['CacheDirectory']}") in (Path(x), *Path(x).parents) for x in caches.values())
    written = (SYSTEMD / "server.toml").read_text()
    options = accepted(tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", written, flags=re.MULTILINE)))
    assert options.host == options.http_host == "0.0.0.0" and options.api_keys


def test_systemd_knows_each_line_of_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` also checks that program and user exist, so the copy has others."""
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "saccade.service"
    text = (SYSTEMD / "saccade.service").read_text().replace("/opt/saccade/bin/saccade", "/bin/true")
    copy.write_text(text.replace("User=saccade", "User=root"))
    done = subprocess.run([verify, "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if copy.name in line]) == (0, [])


def test_alerts_are_about_metrics_and_codes_that_there_are() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    listed = (ROOT / "docs" / "metrics.md").read_text()
    asked = {name for rule in group["rules"] for name in re.findall(r"saccade_\w+", rule["expr"])}
    for name in asked:
        assert f"| `{name.removesuffix('_bucket')}` |" in listed, name
    named = {code for rule in group["rules"] for code in re.findall(r'code="(\w+)"', rule["expr"])}
    assert named and named <= {code.name for code in Code}
    tested = yaml.safe_load((ROOT / "tests" / "support" / "alerts_test.yaml").read_text())["tests"]
    fired = [x["alertname"] for test in tested for x in test["alert_rule_test"] if x.get("exp_alerts")]
    assert sorted(fired) == sorted(rule["alert"] for rule in group["rules"])


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    test = ROOT / "tests" / "support" / "alerts_test.yaml"
    for command in (["check", "rules", ALERTS], ["test", "rules", test]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def _options(arguments: list[str]) -> dict[str, Any]:
    model, *rest = arguments
    found: dict[str, Any] = {"model": model}
    while rest:
        name = rest.pop(0).removeprefix("--").replace("-", "_")
        found[name] = rest.pop(0) if rest and not rest[0].startswith("--") else True
    return found


def test_the_probe_says_what_health_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from certificates import Authority
    from served import make_served

    authority = Authority.create(tmp_path / "authority")
    certificate, key = authority.issue("server")
    model = str(make_served(tmp_path / "model", vision=False).path)
    with RunningServer(model, max_seqs=2, max_len=100, tls_cert=str(certificate), tls_key=str(key)) as server:
        tls = ["--ca", str(authority.certificate)]
        assert probe([server.address, *tls]) == 0
        assert probe([server.address, *tls, "--service", "saccade.v1.InferenceService"]) == 0
        assert probe([server.address, *tls, "--service", "no.such.Service"]) == 1
        assert probe([server.address, *tls, "--server-name", "localhost"]) == 0
        assert probe([server.address, *tls, "--server-name", "elsewhere", "--timeout", "1"]) == 1
        assert probe([server.address]) == 1
        server.loop.call_soon_threadsafe(server.server.drain)
        while not (code := probe([server.address, *tls])):
            pass
        assert code == 1 and "NOT_SERVING" in capsys.readouterr().err
        assert probe([server.address, *tls, "--service", LIVENESS]) == 0
