"""Tables and numbers from the committed results in benchmarks/results."""

from __future__ import annotations

import json
import re
from typing import Any

from . import CHECKOUT

RESULTS = CHECKOUT / "benchmarks" / "results"
# 49.4 %<!-- = 2026-11-22-replicas hit_rate.affinity .1f*100 -->
_NUMBER = re.compile(r"(\d[\d,.]*)([^\d<|\n]{0,12})<!-- = (\S+) (\S+) ([\w.,]+)(?:\*(\S+))? -->")
_WORKLOADS = {
    "decode": "{0} requests, short prompts",
    "prefill": "prompts of {1} tokens, {0} at a time",
    "picture": "{0} image",
    "image": "{0} image",
    "pictures": "{0} images of different sizes",
    "images": "{0} images of different sizes",
}


def result(name: str) -> dict[str, Any]:
    """A result, by its file's name without ".json"."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def value_of(name: str, key: str) -> float:
    """A number of a result; `key` is a path with dots, underscores for spaces, and indices of lists."""
    found: Any = result(name)
    for part in key.split("."):
        if isinstance(found, list):
            found = found[int(part)]
        else:
            found = found[part] if part in found else found[part.replace("_", " ")]
    return found


def fill_numbers(text: str) -> str:
    """`text` with each number before a comment `<!-- = RESULT KEY FORMAT[*FACTOR] -->` as the result has it."""

    def shown(match: re.Match[str]) -> str:
        _, unit, name, key, form, factor = match.groups()
        number = format(value_of(name, key) * (float(factor) if factor else 1), form)
        scale = f"*{factor}" if factor else ""
        return f"{number}{unit}<!-- = {name} {key} {form}{scale} -->"

    return _NUMBER.sub(shown, text)


def machine_line(name: str) -> str:
    """Where and how a result was measured."""
    found = result(name)
    machine = found["machine"]
    return (
        f"`{found['command']}`, {found['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"Python {machine['python']}, torch {machine['torch']}."
    )


def _workload(name: str) -> str:
    kind, _, size = name.partition(" ")
    words = _WORKLOADS[kind].format(*size.split("x"))
    return words.replace("1 requests, short prompts", "1 request, short prompt")


def comparison_table(names: list[str], peer: str) -> str:
    """Saccade beside a peer in the given results, with a line about each."""
    lines = [
        f"| | Saccade, tokens/s | {peer}, tokens/s | ratio | share of the roofline | {peer}'s share |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in (row for name in names for row in result(name)["rows"]):
        shares = [row.get("floor_fraction"), row.get("peer_floor_fraction")]
        shown = [f"{share:.0%}".replace("%", " %") if share is not None else "" for share in shares]
        cells = (
            _workload(row["workload"]), f"{row['ours_tokens_s']:,.0f}", f"{row['peer_tokens_s']:,.0f}",
            f"{row['ratio']:.1f} x", *shown,
        )  # fmt: skip
        lines.append(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |"))
    return "\n".join([*lines, "", *(f"{machine_line(name)}  " for name in names)])


def hybrid_vllm() -> str:
    """The random 116 M-parameter hybrid, beside vLLM."""
    return comparison_table(["2026-11-22-compare-vllm"], "vLLM")


def hybrid_int8() -> str:
    """The same with int8 weights, beside vLLM with bfloat16."""
    return comparison_table(["2026-11-22-compare-vllm-int8"], "vLLM (bf16)")


def hybrid_transformers() -> str:
    """The same hybrid, beside transformers."""
    return comparison_table(["2026-11-22-compare-transformers"], "transformers")


def qwen_vllm() -> str:
    """A random checkpoint of Qwen3.5 0.8B's shape, beside vLLM."""
    parts = ("decode-1-8", "decode-32", "prompts", "images")
    return comparison_table([f"2026-11-22-compare-qwen3_5-vllm-{part}" for part in parts], "vLLM")


def qwen_llamacpp() -> str:
    """The same, beside llama.cpp."""
    return comparison_table(["2026-11-22-compare-qwen3_5-llamacpp"], "llama.cpp")


def overview() -> str:
    """For the README: one row for each workload, beside vLLM and transformers."""
    vllm, transformers = (result(f"2026-11-22-compare-{peer}") for peer in ("vllm", "transformers"))
    ratios = {row["workload"]: row["ratio"] for row in transformers["rows"]}
    lines = [
        "| | Saccade, tokens/s | vLLM, tokens/s | Saccade beside vLLM | beside transformers |",
        "| --- | --: | --: | --: | --: |",
    ]
    for row in vllm["rows"]:
        lines.append(
            f"| {_workload(row['workload'])} | {row['ours_tokens_s']:,.0f} | {row['peer_tokens_s']:,.0f} "
            f"| {row['ratio']:.1f} x | {ratios[row['workload']]:.1f} x |"
        )
    machine = vllm["machine"]
    return "\n".join(
        [*lines, "", f"Measured on {vllm['date']} on {machine['cores']} cores of an {machine['processor']}."]
    )
