"""Tables that put the results of several processors side by side."""

from __future__ import annotations

from typing import Any

from . import results

PROCESSORS = {"zen5": "Zen 5", "zen4": "Zen 4", "amx": "AMX"}
"""Label of results -> name of the processor."""
OTHERS = {
    "vllm-600m": "0.6 B, beside vLLM",
    "vllm-1500m": "1.5 B, beside vLLM",
    "qwen3_5-vllm-decode": "Qwen3.5 0.8B, decode, beside vLLM",
    "qwen3_5-vllm-prompts": "Qwen3.5 0.8B, prompts, beside vLLM",
    "llamacpp-moe": "3 B in experts, beside llama.cpp",
    "llamacpp-int8": "116 M in int8, beside llama.cpp with Q8_0",
    "llamacpp-int8-32-activations-int8": "116 M in int8 in groups of 32, beside llama.cpp with Q8_0",
    "llamacpp-int4-32-activations-int8": "116 M in int4, beside llama.cpp with Q4_0",
    "vllm-avx512vnni": "116 M, AVX-512 without bfloat16 on both sides, beside vLLM",
    "vllm-avx2": "116 M, AVX2 on both sides, beside vLLM",
}
"""Kind of a comparison without its processor -> what is compared."""
INT8 = {
    "weights-nemotron_h-activations-zen5": "116 M, Zen 5",
    "weights-nemotron_h-activations-zen4": "116 M, Zen 4",
    "weights-nemotron_h-activations-amx": "116 M, AMX",
    "weights-nemotron_h-activations-600m-zen5": "0.6 B, Zen 5",
    "weights-nemotron_h-activations-600m-amx": "0.6 B, AMX",
}
"""Result -> model and processor, of int8 weights and activations."""


def _head(titles: list[str]) -> list[str]:
    return [f"| | {' | '.join(titles)} |", f"| --- |{' --: |' * len(titles)}"]


def _table(columns: dict[str, dict[str, str]]) -> str:
    """A table from the cells of each column, by title of the column and workload."""
    lines = _head(list(columns))
    for row in dict.fromkeys(name for cells in columns.values() for name in cells):
        lines.append(f"| {results.workload(row)} | {' | '.join(cells.get(row, '-') for cells in columns.values())} |")
    return "\n".join(lines)


def _beside(peer: str) -> str:
    """The ratio of the 116 M model to a peer and Saccade's share of the roofline, by workload and processor."""

    def cell(row: dict[str, Any]) -> str:
        share = row.get("floor_fraction")
        return f"{row['ratio']:.1f} x" + ("" if share is None else f" ({share:.0%})".replace("%", " %"))

    found = {name: results.result(f"compare-{peer}-{label}") for label, name in PROCESSORS.items()}
    columns = {name: {row["workload"]: cell(row) for row in one["rows"]} for name, one in found.items()}
    dates = ", ".join(f"{one['date']} ({name})" for name, one in found.items())
    return f"{_table(columns)}\n\nMeasured on {dates}, with the version of Saccade at that date."


def beside_vllm() -> str:
    """The 116 M model compared with vLLM, by processor."""
    return _beside("vllm")


def beside_llamacpp() -> str:
    """The 116 M model compared with llama.cpp, by processor."""
    return _beside("llamacpp")


def others() -> str:
    """The smallest and the largest ratio of the workloads of other models, formats and instruction sets that have been
    measured."""
    lines = _head(list(PROCESSORS.values()))
    for kind, title in OTHERS.items():
        cells = []
        for label in PROCESSORS:
            name = f"compare-{kind}-{label}"
            rows = results.result(name)["rows"] if results.exists(name) else []
            ratios = sorted(row["ratio"] for row in rows)
            cells.append(f"{ratios[0]:.1f} to {ratios[-1]:.1f} x" if ratios else "-")
        if set(cells) != {"-"}:
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _speedups(name: str, kind: str) -> dict[str, str]:
    """Speed of a kind of weights and activations compared with bfloat16, by workload of a result."""
    cells = {}
    for row in results.result(name)["rows"]:
        cells[row["workload"]] = f"{row['speedup'][kind]:.2f} x"
        if row["workload"] == "decode 32":
            cells[f"{row['workload']}, decoding alone"] = f"{row['decode_speedup'][kind]:.2f} x"
    return cells


def _machines(*names: str) -> str:
    return "  \n".join(results.machine_line(results.result(name)) for name in names)


def int8_activations() -> str:
    """int8 weights and activations compared with bfloat16, by model, processor and workload."""
    columns = {title: _speedups(name, "int8+int8") for name, title in INT8.items()}
    return f"{_table(columns)}\n\n{_machines(*INT8)}"


def int4_activations() -> str:
    """int4 weights compared with bfloat16, by size of the groups, activations and workload."""
    name = "weights-nemotron_h-activations-int4-zen5"
    kinds = {
        "int4+int8": "int4, activations int8",
        "int4-32+int8": "int4-32, activations int8",
        "int4-32": "int4-32, activations bfloat16",
    }
    return f"{_table({title: _speedups(name, kind) for kind, title in kinds.items()})}\n\n{_machines(name)}"
