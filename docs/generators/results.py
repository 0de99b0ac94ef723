"""Tables and numbers from the committed results in benchmarks/results."""

from __future__ import annotations

import json
import re
from typing import Any

from . import CHECKOUT

RESULTS = CHECKOUT / "benchmarks" / "results"
# Matches for example: 49.4 %<!-- = replicas hit_rate.affinity .1f*100 -->
_NUMBER = re.compile(r"(\d[\d,.]*)([^\d<|\n]{0,12})<!-- = (\S+) (\S+) ([\w.,]+)(?:\*(\S+))? -->")


def newest(pattern: str) -> list[str]:
    """The names, without ".json", of the newest results of each kind that matches a glob pattern. The kind is the name
    of the file without date and ".json"."""
    found: dict[str, str] = {}
    for path in sorted(RESULTS.glob(f"????-??-??-{pattern}.json")):
        found[path.stem[11:]] = path.stem
    if not found:
        raise ValueError(f"benchmarks/results has no file of the kind {pattern}")
    return [stem for _, stem in sorted(found.items())]


def exists(kind: str) -> bool:
    """Whether there is a result of a kind."""
    return any(RESULTS.glob(f"????-??-??-{kind}.json"))


def result(kind: str) -> dict[str, Any]:
    """The contents of the newest result of a kind."""
    found: dict[str, Any] = json.loads((RESULTS / f"{newest(kind)[0]}.json").read_text("utf-8"))
    return found


def value_of(name: str, key: str) -> float:
    """A number from the newest result of the kind `name`. `key` is a path of keys and list indices, separated by dots,
    with underscores in place of spaces."""
    found: Any = result(name)
    for part in key.split("."):
        if isinstance(found, list):
            found = found[int(part)]
        else:
            found = found[part] if part in found else found[part.replace("_", " ")]
    return found


def fill_numbers(text: str) -> str:
    """`text` in which each number before a comment `<!-- = RESULT KEY FORMAT[*FACTOR] -->` is replaced by that of the
    result."""

    def shown(match: re.Match[str]) -> str:
        _, unit, name, key, form, factor = match.groups()
        number = format(value_of(name, key) * (float(factor) if factor else 1), form)
        scale = f"*{factor}" if factor else ""
        return f"{number}{unit}<!-- = {name} {key} {form}{scale} -->"

    return _NUMBER.sub(shown, text)


def machine_line(found: dict[str, Any]) -> str:
    """A line that says with which command, when and on which machine a result was measured."""
    machine = found["machine"]
    model = f", {machine['model']}" if "model" in machine else ""
    known = f" ({machine['instruction_set']})" if "instruction_set" in machine else ""
    return (
        f"`{found['command']}`, {found['date']}: {machine['processor']}{model}{known}, {machine['cores']} cores, "
        f"Python {machine['python']}, torch {machine['torch']}."
    )


def workload(name: str) -> str:
    """A description of a workload from its name: "decode 8", "prefill 32x128", or a kind of image and their number, and
    what else is said of it after a comma."""
    name, comma, rest = name.partition(",")
    if comma:
        return f"{workload(name)},{rest}"
    kind, _, size = name.partition(" ")
    count, _, tokens = size.partition("x")
    if kind == "decode":
        return "1 request, short prompt" if count == "1" else f"{count} requests, short prompts"
    if kind == "prefill":
        return f"prompts of {int(tokens):,} tokens, {count} at a time"
    return "1 image" if count == "1" else f"{count} images of different sizes"


def _ratio(row: dict[str, Any]) -> str:
    """The ratio of a comparison, with the smallest and largest ratio of its rounds if there were several."""
    if len(row.get("rounds", ())) < 2:
        return f"{row['ratio']:.1f} x"
    return f"{row['ratio']:.2f} x ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"


def comparison_table(pattern: str, peer: str) -> str:
    """Saccade compared with a peer, from the newest results of the kinds that match `pattern`, and a `machine_line` for
    each."""
    found = [result(name[11:]) for name in newest(pattern)]
    lines = [
        f"| | Saccade, tokens/s | {peer}, tokens/s | ratio | share of the roofline | {peer}: share |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in (row for one in found for row in one["rows"]):
        shares = [row.get("floor_fraction"), row.get("peer_floor_fraction")]
        shown = [f"{share:.0%}".replace("%", " %") if share is not None else "" for share in shares]
        cells = (
            workload(row["workload"]), f"{row['ours_tokens_s']:,.0f}", f"{row['peer_tokens_s']:,.0f}",
            _ratio(row), *shown,
        )  # fmt: skip
        lines.append(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |"))
    return "\n".join([*lines, "", *(f"{machine_line(one)}  " for one in found)])


INTEL = {
    "vllm-intel": ("vLLM", "bfloat16"), "vllm-avx2-intel": ("vLLM", "bfloat16, AVX2 on both sides"),
    "llamacpp-intel": ("llama.cpp", "bfloat16"), "llamacpp-int8-intel": ("llama.cpp", "int8, beside Q8_0"),
    "llamacpp-int4-32-intel": ("llama.cpp", "int4 in groups of 32, beside Q4_0"),
}  # fmt: skip
"""Peer and title of a comparison, by kind, of the results labelled `intel`; the title names the weights."""
ZEN1 = {
    "llamacpp-int8-decode-zen1": ("llama.cpp", "int8, beside Q8_0"),
    "llamacpp-int4-32-activations-int8-*-zen1": (
        "llama.cpp", "int4 in groups of 32 with activations in int8, beside Q4_0",
    ),
}  # fmt: skip
"""Peer and title of a comparison, by kind, of the results labelled `zen1`."""
KINDS = {
    "vllm": ("vLLM", "116 M parameters, bfloat16"), "transformers": ("transformers", "116 M parameters, bfloat16"),
    "vllm-int8": ("vLLM", "116 M parameters, int8, beside bfloat16"),
    "vllm-8192-tokens": ("vLLM", "116 M parameters, bfloat16, prompts of 8,192 tokens"),
    "vllm-600m": ("vLLM", "0.6 B parameters"), "vllm-1500m": ("vLLM", "1.5 B parameters"),
    "vllm-avx512vnni": ("vLLM", "116 M parameters, AVX-512 without bfloat16 on both sides"),
    "vllm-avx2": ("vLLM", "116 M parameters, AVX2 on both sides"),
    "llamacpp": ("llama.cpp", "116 M parameters, bfloat16"),
    "llamacpp-int8": ("llama.cpp", "116 M parameters, int8, beside Q8_0"),
    "llamacpp-int8-32-activations-int8": (
        "llama.cpp",
        "116 M parameters, int8 in groups of 32 with activations in int8, as llama.cpp has them, beside Q8_0",
    ),
    "llamacpp-int4-32": ("llama.cpp", "116 M parameters, int4 in groups of 32, beside Q4_0"),
    "llamacpp-int4-32-activations-int8": (
        "llama.cpp",
        "116 M parameters, int4 in groups of 32 with activations in int8, as llama.cpp has them, beside Q4_0",
    ),
    "llamacpp-int8-avx2": ("llama.cpp", "116 M parameters, int8, beside Q8_0, AVX2 on both sides"),
    "llamacpp-int8-32-activations-int8-avx2": (
        "llama.cpp",
        "116 M parameters, int8 in groups of 32 with activations in int8, beside Q8_0, AVX2 on both sides",
    ),
    "llamacpp-int4-32-activations-int8-avx2": (
        "llama.cpp",
        "116 M parameters, int4 in groups of 32 with activations in int8, beside Q4_0, AVX2 on both sides",
    ),
    "llamacpp-moe": ("llama.cpp", "3 B parameters in experts, 0.6 B for each token, bfloat16"),
}  # fmt: skip
"""Peer and title of a comparison on one processor, by kind without the processor's label."""


def labelled(label: str) -> dict[str, tuple[str, str]]:
    """`KINDS` with a processor's label added to each kind."""
    return {f"{kind}-{label}": named for kind, named in KINDS.items()}


def titled_tables(kinds: dict[str, tuple[str, str]]) -> str:
    """The tables of those of these comparisons that have a result. `kinds`: the kind's name after `compare-` -> (peer,
    title)."""
    known = {kind: named for kind, named in kinds.items() if exists(f"compare-{kind}")}
    return "\n\n".join(
        f"{title}:\n\n{comparison_table(f'compare-{kind}', peer)}" for kind, (peer, title) in known.items()
    )


def without_bf16() -> str:
    """The comparisons of `INTEL`."""
    return titled_tables(INTEL)


def zen5() -> str:
    """The comparisons on Zen 5."""
    return titled_tables(labelled("zen5"))


def amx() -> str:
    """The comparisons on a processor with AMX."""
    return titled_tables(labelled("amx"))


def zen4() -> str:
    """The comparisons on Zen 4."""
    return titled_tables(labelled("zen4"))


def avx2() -> str:
    """The comparisons on Zen 1."""
    return titled_tables(ZEN1)


def contexts() -> str:
    """Time per prompt token and per decode step, by the length of the context."""
    found = result("contexts")
    lines = [
        "| layers | tokens of the context | prompt, us per token | decode step, ms |",
        "| --- | --: | --: | --: |",
    ]
    for kind, rows in found["rows"].items():
        name = {"mamba": "8 Mamba-2", "attention": "2 attention"}[kind]
        for row in rows:
            cells = (name, f"{row['tokens']:,}", f"{row['prompt_us_per_token']:,.0f}", f"{row['step_ms']:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", machine_line(found)])


def qwen_vllm() -> str:
    """A random checkpoint with the shape of Qwen3.5 0.8B, compared with vLLM."""
    processors = {"zen5": "AMD EPYC, Zen 5", "zen4": "AMD EPYC, Zen 4", "amx": "Intel Xeon with AMX"}
    kinds = {
        f"qwen3_5-vllm-{part}-{label}": ("vLLM", f"{processor}, {part}")
        for label, processor in processors.items()
        for part in ("decode", "prompts", "images")
    }
    return titled_tables(kinds)


def qwen_llamacpp() -> str:
    """A random checkpoint with the shape of Qwen3.5 0.8B, compared with llama.cpp."""
    return comparison_table("compare-qwen3_5-llamacpp*", "llama.cpp")


def lfm_vllm() -> str:
    """A random checkpoint with the shape of LFM2-VL 450M, compared with vLLM."""
    return titled_tables({"lfm2_vl-vllm-amx": ("vLLM", "Intel Xeon with AMX")})


def http_load() -> str:
    """`vllm bench serve` against the HTTP servers: a row for each kind of request, rate and server."""
    found = result("http-load")
    names = {"ours": "Saccade", "vllm": "vLLM", "llamacpp": "llama.cpp"}
    lines = [
        "| requests | per second | server | first token, p50 / p99 ms | between tokens, p50 / p99 ms | tokens/s |",
        "| --- | --: | --- | --: | --: | --: |",
    ]
    for cell in found["cells"]:
        first, between = (f"{cell[f'{m}_p50_ms']:,.0f} / {cell[f'{m}_p99_ms']:,.0f}" for m in ("ttft", "itl"))
        rate = "all at once" if cell["rate"] == "inf" else cell["rate"]
        bind = " (both cores)" if "--threads-bind" in cell["command"] else ""
        told = (cell["kind"], rate, names[cell["side"]] + bind, first, between, f"{cell['output_throughput']:,.0f}")
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join([*lines, "", machine_line({**found, "command": "python -m benchmarks.http_load ... --write"})])


def drafts() -> str:
    """Decoding with drafts compared with plain decoding: a row for each model, number of requests, drafter and text."""
    models = {"nemotron_h": "hybrid 0.6 B", "qwen3_5": "Qwen3.5 0.8B"}
    texts = {"repeating": "repeats", "branching": "repeats in part", "rate 1.0": "does not repeat"}
    files = [result(name[11:]) for name in newest("speculation-rates-*")]
    found: dict[tuple[str, int, str, str], dict[str, dict[str, Any]]] = {}
    for file in files:
        first = file.get("draft_vocab")
        for cell in file["cells"]:
            source = cell["drafts"] if first is None else f"{cell['drafts']}, first {first:,} ids"
            found.setdefault((cell["model"], cell["requests"], source, cell["text"]), {})[cell["policy"]] = cell
    lines = [
        "| model | requests | drafts | text or acceptance | plain, tokens/s | adaptive | always 3 drafts |",
        "| --- | --: | --- | --- | --: | --: | --: |",
    ]
    for (model, requests, source, text), of in found.items():
        cell = of["adaptive" if "adaptive" in of else "fixed"]
        share = cell["drafts"] == "mtp"  # of accepted drafts
        rate = f"{float(text.removeprefix('rate ')):.0%}".replace("%", " %") if share else texts[text]
        ratios = (f"{of[policy]['ratio']:.2f} x" if policy in of else "" for policy in ("adaptive", "fixed"))
        plain = f"{cell['plain']:,.0f}"
        lines.append(f"| {' | '.join((models[model], str(requests), source, rate, plain, *ratios))} |")
    return "\n".join([*lines, "", "  \n".join(machine_line(file) for file in files)])


def memory() -> str:
    """Peak memory by kind of weights, compared with that of llama.cpp with weights of as many bits."""
    found = result("memory")
    lines = ["| weights | Saccade, MiB | llama.cpp, MiB |", "| --- | --: | --: |"]
    for kind, peer in (("bfloat16", "bf16"), ("int8", "q8_0"), ("int4", "q4_0"), ("int4-32", "q4_0")):
        sizes = (f"{found['peak_bytes'][name] / 2**20:.0f}" for name in (kind, f"llama.cpp {peer}"))
        lines.append(f"| {kind}; {peer.upper()} | {' | '.join(sizes)} |")
    return "\n".join([*lines, "", machine_line(found)])


def headline() -> str:
    """For the README: how fast, compared with whom, where."""
    vllm, transformers = (result(f"compare-{kind}-zen5") for kind in ("vllm", "transformers"))
    beside_vllm, beside_transformers = (
        "{:.1f} to {:.1f} times".format(*(choose(row["ratio"] for row in each["rows"]) for choose in (min, max)))
        for each in (vllm, transformers)
    )
    machine = vllm["machine"]
    return (
        f"**How fast.** On {machine['cores']} cores of an {machine['processor']} processor (Zen 5), a hybrid model of "
        f"116 M parameters is {beside_vllm} as fast as in vLLM's CPU build, and {beside_transformers} as fast as in "
        "transformers, in each workload of [Speed](#speed)."
    )


def overview() -> str:
    """For the README: a row for each workload, compared with vLLM and transformers."""
    vllm, older, transformers = (result(f"compare-{kind}") for kind in ("vllm-zen5", "vllm-zen4", "transformers-zen5"))
    ratios = [{row["workload"]: row["ratio"] for row in each["rows"]} for each in (vllm, older, transformers)]
    lines = [
        "| | Saccade, tokens/s | vLLM, tokens/s | ratio to vLLM | ratio to vLLM on Zen 4 | ratio to transformers |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in vllm["rows"]:
        name = row["workload"]
        beside = " | ".join(f"{of[name]:.1f} x" if name in of else "" for of in ratios)
        lines.append(f"| {workload(name)} | {row['ours_tokens_s']:,.0f} | {row['peer_tokens_s']:,.0f} | {beside} |")
    machine = vllm["machine"]
    where = (
        f"Measured on {vllm['date']} on {machine['cores']} cores of an {machine['processor']} processor (Zen 5), in "
        f"bfloat16. The ratio on Zen 4 was measured on {older['date']}, with the version of Saccade at that date."
    )
    return "\n".join([*lines, "", where])
