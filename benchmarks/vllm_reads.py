"""Checks that vLLM reads the files of `saccade quantize --format compressed-tensors` with the same result.

    python -m benchmarks.vllm_reads [--model nemotron_h|qwen3_5] [--kinds plain,fp8,int4]

Quantises a random checkpoint, answers some prompts with it, and computes the log-probabilities of the same tokens with
vLLM's CPU build (benchmarks/setup_vllm.sh); wrong or missing scales change them by whole units. `plain` is the
checkpoint itself, which shows the difference of the two engines in bfloat16. With fp8 weights, vLLM also rounds
activations to fp8; Saccade does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PYTHON = Path("~/.cache/saccade/peers/vllm/bin/python").expanduser()
PROMPTS, NEW = (5, 17, 40, 9), 16
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1",
}  # fmt: skip


def score(model: str, prompts: str, out: str) -> None:
    """The part that runs in vLLM's environment: computes the first greedy token, and the log-probabilities of each
    prompt's last tokens."""
    from vllm import LLM, SamplingParams

    text = json.loads((Path(model) / "config.json").read_text())
    media_limits: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if "vision_config" in text else {}
    engine = LLM(
        model, dtype="bfloat16", max_model_len=512, max_num_seqs=4, skip_tokenizer_init=True, enforce_eager=True,
        enable_prefix_caching=False, **media_limits,
    )  # fmt: skip
    ids: list[list[int]] = json.loads(Path(prompts).read_text())
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=1)
    found = engine.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    rows = []
    for each, output in zip(ids, found, strict=True):
        last = list(zip(each, output.prompt_logprobs, strict=True))[-NEW:]
        best = [max(entry, key=lambda token: entry[token].logprob) for _, entry in last]
        rows.append({"logprobs": [entry[token].logprob for token, entry in last], "best": best})
    Path(out).write_text(json.dumps(rows))


def answers(path: Path) -> tuple[list[list[int]], list[list[float]]]:
    """Saccade's results: prompts with their greedy answers, and the answers' log-probabilities."""
    import saccade

    rng, ids, logprobs = random.Random(1), [], []
    with saccade.LocalClient(path, dtype="bfloat16", max_seqs=4, max_len=512) as client:
        for count in PROMPTS:
            prompt = [rng.randrange(10, 31000) for _ in range(count)]
            answer = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=1)
            assert answer.logprobs is not None
            ids.append([*prompt, *answer.token_ids])
            logprobs.append([entry.logprob for entry in answer.logprobs])
    return ids, logprobs


def compare(path: Path, scratch: Path) -> dict[str, Any]:
    """The differences on the same tokens; or the end of vLLM's output if it does not load the checkpoint."""
    ids, ours = answers(path)
    (scratch / "prompts.json").write_text(json.dumps(ids))
    environment = {**os.environ, **SETTINGS, "LD_PRELOAD": str(PYTHON.parent.parent / "lib" / "libiomp5.so")}
    environment.pop("PYTHONPATH", None)
    files = (path.resolve(), scratch / "prompts.json", scratch / "scores.json")
    command = [str(PYTHON), __file__, "--score", *map(str, files)]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        return {"vllm": "refused", "told": told[-12:]}
    theirs = json.loads((scratch / "scores.json").read_text())
    apart = [abs(a - b) for mine, row in zip(ours, theirs) for a, b in zip(mine, row["logprobs"], strict=True)]
    same = [a == b for row, each in zip(theirs, ids) for a, b in zip(row["best"], each[-NEW:], strict=True)]
    return {"tokens": len(apart), "mean": statistics.mean(apart), "most": max(apart), "same_choice": sum(same)}


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.record import FOLDER  # here, because vLLM's environment, which scores, has no such package

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("nemotron_h", "qwen3_5"), default="qwen3_5")
    parser.add_argument("--kinds", default="plain,fp8,int4")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args(argv)
    from benchmarks import models, qwen_model
    from service.model.checkpoint import Checkpoint
    from service.model.quantise import quantise_checkpoint

    make = models.text_model if arguments.model == "nemotron_h" else qwen_model.small_qwen_model
    source, result = make(arguments.folder), {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in arguments.kinds.split(","):
            path = source
            if kind != "plain":
                path = Path(scratch) / kind
                quantise_checkpoint(Checkpoint(source), path, kind, "compressed-tensors")
            result[kind] = compare(path, Path(scratch))
            print(kind, json.dumps(result[kind]), flush=True)
    print(json.dumps({"model": arguments.model, "kinds": result}))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--score"]:
        score(*sys.argv[2:])
    else:
        raise SystemExit(main())
