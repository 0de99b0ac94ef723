"""Tables of the measurements on a GPU."""

from __future__ import annotations

from typing import Any

from .results import result

MODELS = {"nano-v2-12b-vl": "Nemotron Nano 12B", "nano-3-omni": "Nemotron 3 Nano", "qwen3.5-35b-a3b": "Qwen3.5 35B-A3B"}
OPERATIONS = {
    "selective_state_update b1": "Mamba-2 step, 1 row", "selective_state_update b64": "Mamba-2 step, 64 rows",
    "causal_conv1d_update b64": "convolution step, 64 rows", "chunk_scan 8192": "Mamba-2 prompts, 8,192 tokens",
    "gated_delta_update b64": "gated delta step, 64 rows", "gated_delta_scan 8192": "gated delta prompts, 8,192 tokens",
    "decode_attention b64 4096": "attention, 64 rows of 4,096 tokens",
    "decode_attention b1 131072": "attention, a row of 131,072 tokens",
    "extend_attention prompt 8192": "attention, a prompt of 8,192 tokens", "run_experts 1": "experts, 1 token",
    "run_experts 64": "experts, 64 tokens", "run_experts 4096": "experts, 4,096 tokens",
    "varlen_attention": "attention of 8 images", "add_rms_norm": "norm, 8,192 rows",
    "sample plain": "sampling, 64 rows", "sample top-p": "sampling with top-p, 64 rows of flat logits",
}  # fmt: skip


def _machine(found: dict[str, Any]) -> str:
    machine, ceilings = found["machine"], found["ceilings"]
    return (
        f"{machine['gpu_name']}, {ceilings['copy_gb_s']:,.0f} GB/s copied, {ceilings['bf16_tflop_s']:.0f} TFLOP/s in "
        f"bfloat16, torch {machine['torch']}, Triton {machine['gpu_triton']}."
    )


def kernels() -> str:
    """Times of operations, their shares of the GPU's limits, and the times of other projects' kernels over them."""
    found = result("gpu-kernels")
    lines = [
        "| operation | model | us | share of the limit | vLLM | mamba-ssm | torch |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for name, title in OPERATIONS.items():
        for model, shown in MODELS.items():
            row = found[model].get(name)
            if row is None:
                continue
            share = max(row.get("share_of_copy", 0.0), row.get("share_of_matmul", 0.0))
            ratios = (f"{row[key]:.2f} x" if (key := f"times_{peer}") in row else "" for peer in _PEERS)
            cells = (title, shown, f"{row['seconds'] * 1e6:,.0f}", f"{share:.0%}".replace("%", " %"), *ratios)
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join([*lines, "", _machine(found)])


_PEERS = ("vllm", "mamba-ssm", "torch")


def products() -> str:
    """cuBLAS's times of products over Saccade's, by size of the weight and number of rows."""
    found = result("gpu-products")
    table: dict[str, dict[int, float]] = {}
    for key, row in found["products"].items():
        size, _, rows = key.rpartition(" x ")
        table.setdefault(size, {})[int(rows)] = row["times_cublas"]
    columns = sorted({rows for of in table.values() for rows in of})
    lines = [
        f"| outputs x inputs | {' | '.join(f'{rows:,} rows' for rows in columns)} |",
        f"| --- {'| --: ' * len(columns)}|",
    ]
    for size, of in table.items():
        cells = (f"{of[rows]:.2f} x" if rows in of else "" for rows in columns)
        name = " x ".join(f"{int(part):,}" for part in size.split("x"))
        lines.append(f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join([*lines, "", _machine(found)])
