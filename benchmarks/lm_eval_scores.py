"""lm-eval's `local-completions` over HTTP, on a task defined here: its scores must equal those through gRPC.

    python -m benchmarks.lm_eval_scores --python /path/to/lm-eval's/python [--model demo]

lm-eval is not a dependency; an environment for it: `python -m venv V && V/bin/pip install 'lm-eval[api]' transformers`.
The task has questions with four choices, scored by their log-likelihood (`echo` and `logprobs` of /v1/completions). For
each choice the log-likelihood is computed through gRPC as well, from the prompt's log-probabilities, with the same
tokens; both numbers must be equal. Nothing is downloaded. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import saccade
from service.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
COLOURS = ("red", "green", "blue", "yellow")
THINGS = ("circle", "square", "triangle", "cross", "ring")
TASK = """
task: saccade_scores
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


def documents() -> list[dict[str, Any]]:
    """Questions with four choices."""
    return [
        {
            "question": f"What colour is the {thing} beside {count} others?",
            "choices": list(COLOURS),
            "answer": count % 4,
        }
        for thing in THINGS
        for count in range(2, 6)
    ]


def evaluated(python: str, url: str, tokenizer: Path, folder: Path) -> list[dict[str, Any]]:
    """lm-eval's samples."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents()))
    (folder / "saccade_scores.yaml").write_text(TASK.format(data=data))
    arguments = f"model=,base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=4,max_retries=1"
    command = [
        python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "saccade_scores",
        "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples", "--batch_size", "4",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    environment["HF_DATASETS_CACHE"] = str(folder / "cache")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lm-eval failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def score(client: saccade.Client, tokenizer: Tokenizer, question: str, choice: str) -> float:
    """The log-likelihood of a choice over gRPC."""
    ids = tokenizer.encode(question + choice, add_special_tokens=False).ids
    start = len(tokenizer.encode(question, add_special_tokens=False).ids)
    answer = client.generate(ids, max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    assert answer.prompt_logprobs is not None
    return sum(entry.logprob for entry in answer.prompt_logprobs[start:] if entry is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a score differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with lm-eval")
    parser.add_argument("--model", default=str(ROOT / "demo" / "model"), help="folder of a model with a tokenizer")
    arguments = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess([arguments.model, "--http-port", "0", "--log-level", "error"]) as server,
        saccade.Client(server.address) as client,
    ):
        samples = evaluated(arguments.python, server.http_url, Path(arguments.model).resolve(), Path(folder))
        scores = wrong = 0
        for sample in samples:
            for asked, told in zip(sample["arguments"].values(), sample["resps"], strict=True):
                scores += 1
                wrong += float(told[0][0]) != score(client, tokenizer, asked["arg_0"], asked["arg_1"])
    print(json.dumps({"documents": len(samples), "scores": scores, "different": wrong}))
    return 1 if wrong or len(samples) != len(documents()) else 0


if __name__ == "__main__":
    sys.exit(main())
