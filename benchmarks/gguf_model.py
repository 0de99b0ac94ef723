"""Converts a benchmark's checkpoint to GGUF in bf16, with llama.cpp's own converter.

    python -m benchmarks.gguf_model CHECKPOINT OUT.gguf LLAMA_CPP_SOURCE

The converter cannot read the checkpoint unchanged: it reads config.json through transformers, which adds defaults for
fields that a dense model does not have, and it needs a released tokenizer. So the configuration is written with the
field names of released files and read directly, and the vocabulary is one word per id, because benchmarks send only
ids.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.byte_tokenizer import END

LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
MIXTURE = re.compile(r"expert|moe|routed|^n_group$|^topk_group$|^norm_topk_prob$")
"""Fields of mixtures of experts; `n_groups` is a field of Mamba layers."""


def converted(model: Path, folder: Path, kind: str = "bf16") -> Path:
    """The checkpoint's GGUF file, next to it; converted if it does not exist yet. `folder`: that of setup_llamacpp.sh.
    `kind`: a llama.cpp weight type."""
    if kind != "bf16":
        plain, out = converted(model, folder), model.with_name(f"{model.name}-{kind}.gguf")
        if not out.exists():
            unfinished = out.with_suffix(".unfinished")
            command = [str(folder / "build" / "bin" / "llama-quantize"), str(plain), str(unfinished), kind]
            subprocess.run(command, check=True, stdout=sys.stderr)
            unfinished.rename(out)
        return out
    source, out = folder / "source", model.with_name(f"{model.name}.gguf")
    if not out.exists():
        unfinished = out.with_suffix(".unfinished")
        command = [sys.executable, "-m", "benchmarks.gguf_model", str(model), str(unfinished), str(source)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        unfinished.rename(out)
    return out


def released_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the field names of released files."""
    kinds = config.pop("layers_block_type", None)
    if kinds is None:
        return config
    config["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)
    config["rms_norm_eps"] = config["layer_norm_epsilon"]  # the released files have both names
    if "moe" not in kinds:
        config = {name: value for name, value in config.items() if not MIXTURE.search(name)}
    return config


def set_vocab(model: Any) -> None:
    """Sets the vocabulary of a converter's model: its byte-level tokenizer's, if it has one, else one word per id."""
    gguf = importlib.import_module("gguf")
    count, writer = model.hparams["vocab_size"], model.gguf_writer
    file = Path(model.dir_model) / "tokenizer.json"
    tokenizer = json.loads(file.read_text()) if file.exists() else None
    if tokenizer is not None and tokenizer["model"]["type"] == "BPE":
        _set_byte_level(writer, gguf.TokenType, tokenizer)
        return
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{index}" for index in range(count)])
    writer.add_token_scores([0.0] * count)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (count - len(kinds)))
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _set_byte_level(writer: Any, kinds: Any, tokenizer: dict[str, Any]) -> None:
    """The vocabulary of `benchmarks.byte_tokenizer`."""
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token, _ in vocabulary])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)


def main(checkpoint: Path, out: Path, source: Path) -> None:
    stage = out.with_name(f"{out.stem}-released")
    stage.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*.safetensors*"):
        if not (stage / file.name).exists():
            (stage / file.name).symlink_to(file.resolve())
    if (tokenizer := checkpoint / "tokenizer.json").exists() and (checkpoint / "tokenizer_config.json").exists():
        (stage / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    (stage / "config.json").write_text(json.dumps(released_config(config), indent=1))
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base = importlib.import_module("conversion.base")
    base.AutoConfig = None  # type: ignore[attr-defined]  # the converter then reads config.json itself
    for module, name in (("nemotron", "NemotronHModel"), ("qwen", "Qwen3_5TextModel")):
        getattr(importlib.import_module(f"conversion.{module}"), name).set_vocab = set_vocab
    without_head = ["--no-mtp"] * (config["model_type"] == "qwen3_5")
    sys.argv = ["convert_hf_to_gguf.py", str(stage), "--outfile", str(out), "--outtype", "bf16", *without_head]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(*(Path(argument) for argument in sys.argv[1:4]))
