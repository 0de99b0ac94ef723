"""Checks that the kernels, both runners and the service are correct on a GPU, from a bare checkout.

    python -m benchmarks.gpu_check [PART ...] [--device cuda] [--scale full] [--seconds 345] [--out DIR]

Parts: `kernels` (the tests of every Triton kernel, against float64), `layers` (one layer of each kind of two decoders
and of a vision tower at real sizes: at most twice the error of the torch reference in the same dtype, both relative to
the reference in float32), `graphs` (graph = eager for both runners), `batches` (in bfloat16, a request gets the same
bits alone and in a batch), `options` (answers of tiny models under combinations of options, in float32), `service` (a
server with the embedded model answers the shipped questions, sequentially and concurrently), `e2e` (the end-to-end
tests, if `make peers` has downloaded the transformers that they need). `--device cpu --scale tiny` tests the program
itself.
Writes gpu-check.json into DIR, and rewrites it after each part. The last line on stdout is JSON. The exit status is 1
if a part failed or had no time left.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_models, machine
from benchmarks.gpu_setting import argument_parser
from decoder.config import DecoderConfig, DecoderOptions
from decoder.request import DecoderRequest, TokenEvent
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from decoder.token_constraints import AllowedTokens
from encoder.runner import EncoderOptions, EncoderRunner
from families.nemotron_h_omni.vision import RadioVision
from kernels.dispatch import forced

ROOT = Path(__file__).resolve().parent.parent
FORCED_TOKEN, FORCED_STEPS = 7, 6
NEEDED_RIGHT = 0.85
"""Share of the shipped questions that the embedded model must answer correctly; it reaches more."""


_deadline = float("inf")


def seconds_left() -> float:
    """Seconds left for the whole run."""
    return _deadline - time.perf_counter()


def require(holds: bool, message: str) -> None:
    """Raises AssertionError with `message` unless `holds`; unlike `assert`, also under `python -O`."""
    if not holds:
        raise AssertionError(message)


def check_kernels(device: str, scale: str) -> dict[str, Any]:
    """Runs pytest on tests/kernels, without the tests that need a transformers with `nemotron_h_omni` if it is
    absent."""
    files = sorted(path for path in (ROOT / "tests/kernels").glob("test_*_triton.py"))
    left_out = [path.name for path in files if "models" in path.name and not _has_oracle()]
    chosen = [path for path in files if path.name not in left_out]
    if scale == "tiny":
        chosen = [path for path in chosen if "patches" in path.name]
    # With xdist, because Triton's compiler takes most of the time, on the host.
    several = ["-n", "8"] if scale == "full" and importlib.util.find_spec("xdist") is not None else []
    said = run_tests([*several, *map(str, chosen)])
    return {"files": [path.name for path in chosen], "left_out": left_out, "said": said}


def run_tests(arguments: Sequence[str]) -> str:
    """pytest's last line of output. `AssertionError` with the end of its output if tests failed or time ran out."""
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=30", "--tb=short", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=max(1.0, seconds_left())
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        log.seek(0)
        said = log.read()
    require(code == 0, ("the time is up: " if code == -1 else "") + said[-8000:])
    return said.splitlines()[-1]


def _has_oracle() -> bool:
    try:
        import transformers.models.nemotron_h_omni  # noqa: F401
    except ImportError:
        return False
    return True


# -- layers ------------------------------------------------------------------------------------------------------------


def events_of(runner: DecoderRunner) -> dict[str, list[TokenEvent]]:
    """Runs a decoder to its end: the events of each request, none of which may be an error."""
    found: dict[str, list[TokenEvent]] = {}
    while runner.has_work:
        for event in runner.step():
            require(event.error is None and event.token_id is not None, f"{event}")
            found.setdefault(event.request_id, []).append(event)
    return found


def logprobs(config: DecoderConfig, device: str, dtype: torch.dtype, lengths: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of one fixed token after prompts of these lengths, and in the following steps, in which that
    token is forced. Used to compare two dtypes or devices."""
    shapes = config.expected_weights()
    options = DecoderOptions(
        dtype=dtype, device=device, max_seqs=len(lengths), max_len=max(lengths) + 16, max_batched_tokens=512,
        graphs="off", native="off",
    )  # fmt: skip
    runner = DecoderRunner(config, options, gpu_models.weights(shapes, device, dtype))
    asked = SamplingParams(
        max_tokens=FORCED_STEPS, temperature=0.0, logit_bias={FORCED_TOKEN: 1e4}, logprobs=0, ignore_eos=True
    )
    generator = torch.Generator().manual_seed(1)
    for index, length in enumerate(lengths):
        prompt = torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        runner.add(DecoderRequest(str(index), prompt, asked))
    found = events_of(runner)
    runner.close()
    for event in (event for events in found.values() for event in events):
        require(event.token_id == FORCED_TOKEN, f"{event}")
    rows = [[event.logprob or 0.0 for event in found[str(index)]] for index in range(len(lengths))]
    return torch.tensor(rows, dtype=torch.float64)


def rows_of(config: RadioVision, device: str, dtype: torch.dtype, grids: Sequence[tuple[int, int]], graphs: str) -> Any:
    """Encoder rows of noise images in one call, as float64 on the host."""
    weights = gpu_models.weights(config.expected_weights(), device, dtype)
    tokens = sum(rows * columns for rows, columns in grids) // config.merge_size**2
    options = EncoderOptions(
        dtype=dtype, device=torch.device(device), graphs=graphs, token_budgets=(tokens,), max_images=len(grids),
        max_tokens_per_step=max(tokens, config.max_image_tokens),
    )  # fmt: skip
    runner = EncoderRunner(config, options, weights)
    images = [gpu_models.noise_image(config, *grid, dtype) for grid in grids]
    out = [torch.empty(image.tokens, config.text_hidden_size, dtype=dtype, device=device) for image in images]
    runner.encode(images, out)
    replayed = any(name.startswith("replays_") for name in runner.stats())
    require(replayed == (graphs == "on"), f"graphs {graphs}: {runner.stats()}")
    runner.close()
    return torch.cat(out).double().cpu()


def hold(run: Callable[[torch.dtype], torch.Tensor]) -> dict[str, float]:
    """Compares `run(bfloat16)` on the kernels with the reference: at most twice the reference's own bfloat16 error."""
    found = run(torch.bfloat16)
    with forced("reference"):
        plain, exact = run(torch.bfloat16), run(torch.float32)
    require(bool(found.isfinite().all()), "results that are not finite")
    size = exact.square().mean().sqrt()
    error, own = ((x - exact).square().mean().sqrt() / size for x in (found, plain))
    require(bool(error <= 2 * own + 1e-3), f"relative error {error:.3g}, the reference's own {own:.3g}")
    return {"error": float(error), "reference_error": float(own)}


def decoders(scale: str) -> dict[str, DecoderConfig]:
    """One layer of each kind of three models."""
    return {
        "nemotron-9b": gpu_models.decoder(scale, layers=True),
        "nano-3-30b": gpu_models.decoder(scale, experts=True, layers=True),
        "qwen3.5-35b": gpu_models.delta_decoder(scale),
    }


def check_layers(device: str, scale: str) -> dict[str, Any]:
    """Checks each kind of layer at real sizes."""
    full = scale == "full"
    lengths = (1, 17, 130, 700) if full else (1, 5, 19)
    grids = ((32, 32), (30, 40), (68, 120)) if full else ((4, 6), (6, 4))
    tower = gpu_models.tower(scale, layers=2)
    numbers: dict[str, Any] = {}
    for name, config in decoders(scale).items():
        print(f"layers of {name}", file=sys.stderr, flush=True)
        numbers[name] = hold(partial(logprobs, config, device, lengths=lengths))
    numbers["radio-h"] = hold(lambda dtype: rows_of(tower, device, dtype, grids, "off"))
    return numbers


# -- graphs ------------------------------------------------------------------------------------------------------------


CONSTRAINED = (1, 2)
"""Requests that may draw only every third token: one is sampled, one greedy."""


def answers(config: DecoderConfig, device: str, graphs: str) -> dict[str, list[int]]:
    """Tokens of greedy, sampled and constrained rows that start and end at different steps, in float32."""
    options = DecoderOptions(
        device=device, max_seqs=4, max_len=160, max_batched_tokens=64, graphs=graphs, max_capture=64, native="off"
    )
    runner = DecoderRunner(config, options, gpu_models.weights(config.expected_weights(), device, torch.float32))
    generator = torch.Generator().manual_seed(2)
    for index in range(7):
        prompt = torch.randint(0, config.vocab_size, (1 + 13 * index,), generator=generator).tolist()
        params = SamplingParams(max_tokens=3 + 2 * index, temperature=float(index % 2), seed=index, ignore_eos=True)
        constraint = AllowedTokens(range(index, config.vocab_size, 3)) if index in CONSTRAINED else None
        runner.add(DecoderRequest(str(index), prompt, params, constraint=constraint))
    found = {name: [event.token_id or 0 for event in events] for name, events in events_of(runner).items()}
    for index in CONSTRAINED:
        wrong = [token for token in found[str(index)] if token % 3 != index % 3]
        require(not wrong, f"request {index} has tokens that its constraint does not allow: {wrong}")
    replays = [value for name, value in runner.stats().items() if name.startswith("replays_")]
    require((sum(replays) > 0) == (graphs == "on"), f"graphs {graphs}: {runner.stats()}")
    runner.check_integrity()
    runner.close()
    return found


def check_graphs(device: str, scale: str) -> dict[str, Any]:
    """Checks that graphs equal eager calls: tokens of the decoder, rows of the encoder, in float32."""
    tokens = 0
    for name in ("nemotron-9b", "qwen3.5-35b"):
        config = decoders(scale)[name]
        eager, replayed = answers(config, device, "off"), answers(config, device, "on")
        require(replayed == eager, f"{name}: graph {replayed}, eager {eager}")
        tokens += sum(map(len, eager.values()))
    tower = gpu_models.tower(scale, layers=2)
    grids = ((32, 32), (30, 40), (40, 40)) if scale == "full" else ((4, 6), (6, 4))
    rows = [rows_of(tower, device, torch.float32, grids, graphs) for graphs in ("off", "on")]
    difference = float((rows[1] - rows[0]).abs().max() / rows[0].abs().max())
    require(difference < 1e-4, f"encoder: graph and eager differ by {difference:.3g} of the largest value")
    return {"tokens": tokens, "encoder_difference": difference}


# -- batches and options -----------------------------------------------------------------------------------------------


def drawn(config: DecoderConfig, device: str, lengths: Sequence[int], *, graphs: str) -> list[list[tuple[Any, ...]]]:
    """(token, log-probability) of each step of requests with prompts of these lengths, which run together, in bfloat16;
    the first is always the same request."""
    options = DecoderOptions(
        dtype=torch.bfloat16, device=device, max_seqs=len(lengths), max_len=1024, max_batched_tokens=512, graphs=graphs,
        max_capture=64, native="off",
    )  # fmt: skip
    runner = DecoderRunner(config, options, gpu_models.weights(config.expected_weights(), device, torch.bfloat16))
    generator = torch.Generator().manual_seed(3)
    for index, length in enumerate(lengths):
        prompt = torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        params = SamplingParams(max_tokens=24, temperature=float(index % 2), seed=index, logprobs=0, ignore_eos=True)
        runner.add(DecoderRequest(str(index), prompt, params))
    found = events_of(runner)
    runner.close()
    return [[(event.token_id, event.logprob) for event in found[str(index)]] for index in range(len(lengths))]


def check_batches(device: str, scale: str) -> dict[str, Any]:
    """Checks that neither other requests nor graphs change a bit of a request in bfloat16: with Mamba-2 and attention,
    with experts, and with the gated delta rule and gated experts."""
    long, differ, steps = 300 if scale == "full" else 20, {}, 0
    for model, config in decoders(scale).items():
        alone = drawn(config, device, [long], graphs="off")[0]
        steps += len(alone)
        for name, lengths, graphs in (
            ("with 3", [long, 1, 40, long], "off"),
            ("with 11", [long, *range(5, 60, 5)], "off"),
            ("with 11 in graphs", [long, *range(5, 60, 5)], "on"),
        ):
            found = drawn(config, device, lengths, graphs=graphs)[0]
            differ[f"{model} {name}"] = sum(one != other for one, other in zip(alone, found, strict=True))
    require(device == "cpu" or not any(differ.values()), f"of {steps} steps, so many differ from alone: {differ}")
    return {"steps": steps, "differ": differ}


def check_options(device: str, scale: str) -> dict[str, Any]:
    """Checks that no combination of options changes an answer of a tiny model, in float32."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    from gated_decoder import gated_config
    from speculation import AXES, answers, pairwise

    axes = {name: values for name, values in AXES.items() if name != "native"}
    cases = pairwise(axes)[: None if scale == "full" else 2]
    wrong: list[str] = []
    models: dict[str, dict[str, Any]] = {"plain": {}, "delta": {"config": gated_config("G*-", mtp=True)}}
    for name, model in models.items():
        given = {**model, "native": "off", "device": device}
        plain = answers(**given, graphs="off", state_cache="none")
        for case in cases:
            found = answers(**given, **case, known=plain.drawn, draft_tokens=3, max_capture=16)
            if found.drawn != plain.drawn:
                wrong.append(f"{name} {case}")
    require(not wrong, f"other answers with {wrong}")
    return {"cases": len(cases) * len(models)}


# -- service -----------------------------------------------------------------------------------------------------------


def check_service(device: str, scale: str) -> dict[str, Any]:
    """Runs the embedded model behind gRPC: answers are correct, and the same at any concurrency."""
    import saccade
    from service.commands.server_process import ServerProcess

    questions = json.loads((ROOT / "demo/questions.json").read_text())
    questions = questions if scale == "full" else questions[:3]

    def ask(client: saccade.Client, index: int) -> list[int]:
        question = questions[index]
        images = [ROOT / "demo/pictures" / name for name in question["images"]]
        answer = client.generate(question["question"], images=images, temperature=0.0, max_tokens=64)
        texts[index] = answer.text
        return list(answer.token_ids)

    texts = [""] * len(questions)
    server = ServerProcess(["demo", "--device", device, "--dtype", "float32"])
    try:
        with saccade.Client(server.address) as client, ThreadPoolExecutor(16) as pool:
            alone = [ask(client, index) for index in range(len(questions))]
            together = list(pool.map(lambda index: ask(client, index), range(len(questions))))
    finally:
        code = server.stop()
    require(code == 0, f"the server ended with {code}")
    different = sum(a != b for a, b in zip(alone, together, strict=True))
    right = sum(text.strip() == q["answer"] for text, q in zip(texts, questions, strict=True)) / len(questions)
    require(different == 0, f"{different} of {len(questions)} answers changed when asked together")
    require(right >= NEEDED_RIGHT, f"{right:.2f} of the answers are right, {NEEDED_RIGHT} are needed")
    return {"questions": len(questions), "right": right}


def check_e2e(device: str, scale: str) -> dict[str, Any]:
    """Runs the end-to-end tests of answers, whose servers choose the GPU by themselves."""
    if scale == "tiny" or not _has_oracle():
        return {"left_out": "needs a whole machine and a transformers with nemotron_h_omni (`make peers`)"}
    files = [f"tests/e2e/test_{name}.py" for name in ("service", "parity", "congruence", "resume", "life")]
    return {"said": run_tests(files)}


PARTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "layers": check_layers,
    "graphs": check_graphs,
    "batches": check_batches,
    "options": check_options,
    "service": check_service,
    "kernels": check_kernels,
    "e2e": check_e2e,
}


def run_part(name: str, device: str, scale: str) -> dict[str, Any]:
    """Runs a part. Never raises: an exception becomes a failure with its traceback."""
    started = time.perf_counter()
    try:
        require(seconds_left() > 0, "left out: the time is up")
        result = {"passed": True, **PARTS[name](device, scale)}
    except Exception:
        print(text := traceback.format_exc(), file=sys.stderr, flush=True)
        result = {"passed": False, "error": text[-8000:]}
    if device != "cpu":
        torch.cuda.empty_cache()
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a part failed."""
    parser = argument_parser(__doc__, seconds=345.0)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)} (default: all)")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(
            f"--device {arguments.device}: this torch finds no GPU; --device cpu --scale tiny runs without one"
        )
    global _deadline
    _deadline = time.perf_counter() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine.describe() | machine.gpu()}
    for name in arguments.parts or list(PARTS):
        results[name] = run_part(name, arguments.device, arguments.scale)
        said = "passed" if results[name]["passed"] else "FAILED"
        print(f"{name}: {said} in {results[name]['seconds']} s", flush=True)
        (arguments.out / "gpu-check.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    return 0 if all(results[name]["passed"] for name in results if name != "machine") else 1


if __name__ == "__main__":
    sys.exit(main())
