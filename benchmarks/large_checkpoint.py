"""A random checkpoint of Nemotron 3 Nano Omni's shape in NVIDIA's mixed NVFP4, of a given size.

    python -m benchmarks.large_checkpoint FOLDER [--gigabytes 16] [--experts 128] [--new-tokens 32] [--write]

Writes FOLDER tensor by tensor, unless it exists: the whole tower, and as many of the first layers of the released
pattern as fit into the given number of GB. As in the release, routed experts are NVFP4, shared experts and attention
outputs FP8, all else bfloat16. Then it serves the checkpoint and measures the time until the server is ready, its peak
and resident memory, the tokens per second of one request compared with the time of reading a token's weights, and the
seconds of an answer about an image through gRPC. Fewer `--experts` make a small checkpoint. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import saccade
from benchmarks import machine
from benchmarks.noise import noise_png
from benchmarks.random_weights import Piece, plain, write_shards
from benchmarks.record import write_result
from decoder.layers.descriptions import Experts
from service.commands.server_process import ServerProcess
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import ModelConfig, load_config

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
TEXT: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "intermediate_size": 1856, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5,
    "eos_token_id": 2, "dtype": "bfloat16", "max_position_embeddings": 262144,
}  # fmt: skip
IMAGE_TOKEN = 18
CONFIG: dict[str, Any] = {
    "model_type": "nemotron_h_omni", "projector_hidden_size": 20480, "image_token_id": IMAGE_TOKEN, "dtype": "bfloat16",
    "vision_config": {"model_type": "radio", "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16},
}  # fmt: skip
IMAGES = {"patch_size": 16, "min_num_patches": 1024, "max_num_patches": 13312}
PROMPT = 64


def configuration(layers: int, experts: int, other: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`other`: fields of the `model`, its `text` and its `vision` that differ from the release."""
    pattern = PATTERN[:layers]
    vision = {**CONFIG["vision_config"], **other.get("vision", {})}
    text = {**TEXT, **other.get("text", {})} | {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
    }
    table: dict[str, dict[str, Any]] = {}
    for index, letter in enumerate(pattern):
        mixer = f"language_model.backbone.layers.{index}.mixer"
        if letter == "E":
            table[f"{mixer}.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
            table[f"{mixer}.shared_experts"] = {"quant_algo": "FP8"}
        elif letter == "*":
            table[f"{mixer}.o_proj"] = {"quant_algo": "FP8"}
    quantised = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table}
    return CONFIG | {
        **other.get("model", {}),
        "text_config": text,
        "vision_config": vision,
        "quantization_config": quantised,
    }


def pieces(config: ModelConfig) -> Iterator[Piece]:
    """Tensors of the checkpoint, layer by layer, under published names."""
    for name, shape in config.decoder.expected_weights().items():
        name = "language_model." + ("backbone." + name.removeprefix("model.") if name.startswith("model.") else name)
        if ".mixer.experts." in name:
            stack, _, last = name.rpartition(".")
            for expert in range(shape[0]):
                yield from nvfp4(f"{stack}.{expert}.{last}", shape[1:])
        elif ".shared_experts." in name or name.endswith(".o_proj.weight"):
            yield from fp8(name.removesuffix(".weight"), shape)
        else:
            yield plain(name, shape)
    assert config.vision is not None
    for name, shape in config.vision.expected_weights().items():
        yield plain(name, shape)


def nvfp4(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    rows, inner = shape
    yield Piece(f"{name}.weight", "U8", (rows, inner // 2), "codes")
    yield Piece(f"{name}.weight_scale", "F8_E4M3", (rows, inner // 16), "scales")
    yield Piece(f"{name}.weight_scale_2", "F32", (), str(1 / (3 * math.sqrt(inner))))
    yield Piece(f"{name}.input_scale", "F32", (), "0.01")


def fp8(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    yield Piece(f"{name}.weight", "F8_E4M3", shape, "fp8")
    yield Piece(f"{name}.weight_scale", "F32", (), str(2 / math.sqrt(shape[1])))
    yield Piece(f"{name}.input_scale", "F32", (), "0.01")


def write_checkpoint(
    folder: Path, gigabytes: float, experts: int, other: Mapping[str, Mapping[str, Any]] | None = None
) -> int:
    """Writes the checkpoint with as many of the first layers as fit, but at least up to the first one with attention,
    and returns their number. An existing checkpoint is kept, whatever its size. `other`: as in `configuration`."""
    if (folder / "complete").exists():
        return int((folder / "complete").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    least = PATTERN.index("*") + 1
    for layers in range(len(PATTERN), least - 1, -1):
        (folder / "config.json").write_text(json.dumps(configuration(layers, experts, other or {}), indent=1))
        parts = list(pieces(load_config(folder)))
        if sum(part.nbytes for part in parts) <= gigabytes * 1e9 or layers == least:
            break
    write_shards(folder, parts)
    (folder / "complete").write_text(str(layers))
    return layers


def bytes_of_a_token(checkpoint: Checkpoint) -> float:
    """Stored bytes of the decoder's weights that one token is multiplied with."""
    config, found = checkpoint.config.decoder, 0.0
    share = {
        f"model.layers.{index}.": spec.num_experts_per_tok / spec.n_routed_experts
        for index, layer in enumerate(config.layers)
        for _, spec in layer.mixers
        if isinstance(spec, Experts)
    }
    for name in config.expected_weights():
        if name != "model.embeddings.weight":
            part = share.get(name.partition("mixer.")[0], 1.0) if ".experts." in name else 1.0
            found += part * checkpoint.weight_bytes(name, 2)
    return found


def memory(pid: int) -> tuple[int, int]:
    """Memory of a server's processes in bytes: the sum of their peaks, and their current private memory."""
    peak = now = 0
    for member in machine.family(pid):
        peak += machine.peak_bytes(member)
        lines = Path(f"/proc/{member}/status").read_text().splitlines()
        fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
        now += sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in fields)
    return peak, now


def measure(folder: Path, new_tokens: int) -> dict[str, Any]:
    """Serves the checkpoint and measures seconds until it is ready, memory, and tokens per second; also returns the ids
    of answers."""
    started = time.perf_counter()
    options = [
        "--dtype",
        "bfloat16",
        "--max-seqs",
        "2",
        "--max-len",
        "4096",
        "--state-cache",
        "none",
        "--log-level",
        "warning",
    ]
    server = ServerProcess([str(folder), *options])
    try:
        result: dict[str, Any] = {"seconds_to_ready": time.perf_counter() - started}
        result["peak_bytes"], result["resident_bytes"] = memory(server.pid)
        with saccade.Client(server.address) as client:
            prompt = list(range(100, 100 + PROMPT))
            generate = functools.partial(client.generate, temperature=0, ignore_eos=True)
            generate(prompt, max_tokens=2)
            started = time.perf_counter()
            generate(prompt, max_tokens=1)
            first = time.perf_counter() - started
            answer = generate(prompt, max_tokens=1 + new_tokens)
            result["prompt_seconds"] = first
            result["tokens_s"] = new_tokens / (time.perf_counter() - started - 2 * first)
            result["answer"] = list(answer.token_ids)
            started = time.perf_counter()
            seen = generate([*prompt, IMAGE_TOKEN], images=[noise_png(random.Random(1), 768, 512)], max_tokens=8)
            result["image_seconds"] = time.perf_counter() - started
            result["image_answer"] = list(seen.token_ids)
            result["image_prompt_tokens"] = seen.usage.prompt_tokens
        result["peak_bytes_served"], _ = memory(server.pid)
    finally:
        server.stop()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=16.0, help="maximum size of the weights")
    parser.add_argument("--experts", type=int, default=128, help="routed experts in each layer")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--only-write", action="store_true", help="write the checkpoint, but measure nothing")
    parser.add_argument("--write", action="store_true", help="write a dated result under benchmarks/results")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    layers = write_checkpoint(arguments.folder, arguments.gigabytes, arguments.experts)
    checkpoint = Checkpoint(arguments.folder)
    stored = checkpoint.stored_as
    print(f"{layers} of {len(PATTERN)} layers, {sum(stored.values()) / 1e9:.2f} GB {stored}, written in "
          f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    if arguments.only_write:
        return 0
    before, read = machine.ceilings(), bytes_of_a_token(checkpoint)
    found = measure(arguments.folder, arguments.new_tokens)
    after = machine.ceilings()
    ceilings = {name: max(before[name], after[name]) for name in before}
    floor = ceilings["read_gb_s"] * 1e9 / read
    result = {
        "machine": machine.describe(), "ceilings": ceilings, "layers": layers, "experts": arguments.experts,
        "stored_bytes": stored, "bytes_of_a_token": read, "floor_tokens_s": floor, **found,
    }  # fmt: skip
    print(f"ready after {found['seconds_to_ready']:.1f} s; peak {found['peak_bytes'] / 1e9:.2f} GB, of which stay "
          f"{found['resident_bytes'] / 1e9:.2f} GB ({found['peak_bytes'] / found['resident_bytes']:.2f}x)")  # fmt: skip
    print(f"{found['tokens_s']:.1f} tokens/s; {read / 1e9:.2f} GB a token allow {floor:.1f}; an image of "
          f"{found['image_prompt_tokens']} tokens answered in {found['image_seconds']:.1f} s")  # fmt: skip
    if arguments.write:
        print(f"written to {write_result('large-checkpoint', result)}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
