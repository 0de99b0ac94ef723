"""A benchmark's checkpoint -> GGUF in bf16, by llama.cpp's own converter.

    python -m benchmarks.gguf_model CHECKPOINT OUT.gguf LLAMA_CPP_SOURCE

Two things stand in the converter's way: it reads config.json through transformers, which adds the defaults of fields
that a dense model has not, and it wants a released tokenizer. So the configuration gets the released files' names and
is read as it is; the vocabulary is a word for each id, since ids are all that is sent.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
MIXTURE = ("expert", "moe", "routed", "n_group", "topk_group", "norm_topk_prob")


def converted(model: Path, folder: Path, kind: str = "bf16") -> Path:
    """The checkpoint's GGUF beside it, made now if need be. `folder`: of setup_llamacpp.sh; `kind`: of llama.cpp's."""
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
    """The fields as released files name them."""
    kinds = config.pop("layers_block_type", None)
    if kinds is None:
        return config
    config["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)
    config["rms_norm_eps"] = config["layer_norm_epsilon"]  # the released files have both names
    if "moe" not in kinds:
        config = {name: value for name, value in config.items() if not any(part in name for part in MIXTURE)}
    return config


def set_vocab(model: Any) -> None:
    """Of a converter's model: a word for each id."""
    gguf = importlib.import_module("gguf")
    count, writer = model.hparams["vocab_size"], model.gguf_writer
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{index}" for index in range(count)])
    writer.add_token_scores([0.0] * count)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (count - len(kinds)))
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def main(checkpoint: Path, out: Path, source: Path) -> None:
    stage = out.with_name(f"{out.stem}-released")
    stage.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*.safetensors*"):
        if not (stage / file.name).exists():
            (stage / file.name).symlink_to(file.resolve())
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
