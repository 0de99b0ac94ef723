"""The peer's side of `benchmarks.compare`: vLLM's CPU build in its own environment (benchmarks/setup_vllm.sh).

The protocol is that of `benchmarks.peer_transformers`, one JSON command per line on stdin. The engine runs as in
offline batches: no server, no tokenizer and no detokenizing, all in vLLM's favour. This file imports nothing of
Saccade, because the two environments have different versions of every library.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def limit_instructions(name: str | None) -> None:
    """Loads the build that vLLM ships for processors without AVX-512 ("avx2"), or without its BF16 ("avx512").
    Neither uses AMX, which vLLM's attention would choose otherwise."""
    if name is None:
        return
    import torch

    assert name in ("avx2", "avx512"), name
    torch.cpu._is_amx_tile_supported = lambda: False
    torch.cpu._is_avx512_bf16_supported = lambda: False
    if name == "avx2":
        torch.cpu._is_avx512_supported = lambda: False


class Peer:
    """One loaded model."""

    def __init__(self, path: str, omni: bool, tokenizer: bool = False, tokens: int = 0) -> None:
        """`tokens`: maximum number of tokens of a prompt and its answer."""
        limit_instructions(os.environ.get("PEER_INSTRUCTION_SET"))
        from vllm import LLM

        limits: dict[str, Any] = {}
        if omni:
            limits = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "trust_remote_code": True}
            # Otherwise vLLM first encodes an image of the maximum size, 16,384 tokens for Qwen3.5.
            limits["skip_mm_profiling"] = True
        elif "vision_config" in json.loads((Path(path) / "config.json").read_text()):
            limits = {"limit_mm_per_prompt": {"image": 0, "video": 0}}  # then the tower is not loaded
        if tokenizer:  # by default grammars allow any white space, and random models would write nothing else
            limits["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
        self.model = LLM(
            path, dtype="bfloat16", max_model_len=max(4096, tokens), max_num_seqs=32,
            skip_tokenizer_init=not omni and not tokenizer, enable_prefix_caching=False, **limits,
        )  # fmt: skip

    def run(self, prompts: list[list[int]], images: list[list[str]], new_tokens: int) -> tuple[float, int]:
        """Seconds and output tokens. Reading files is not timed, in the peer's favour."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        inputs = [self._input(prompt, files) for prompt, files in zip(prompts, images, strict=True)]
        started = time.perf_counter()
        outputs = self.model.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - started, sum(len(output.outputs[0].token_ids) for output in outputs)

    def constrained(
        self, prompts: list[list[int]], schema: dict[str, Any] | None, most: int | list[int]
    ) -> dict[str, Any]:
        """Answers of at most `most` tokens, drawn at temperature 1 under a JSON schema, without white space, which a
        model could repeat without end; without a schema, answers of exactly these numbers of tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = []
        for seed in range(len(prompts)):
            tokens = most if isinstance(most, int) else most[seed]
            common: dict[str, Any] = {"max_tokens": tokens, "temperature": 1.0, "seed": seed}
            if schema is not None:
                common["structured_outputs"] = StructuredOutputsParams(json=schema)
            params.append(SamplingParams(**common, ignore_eos=schema is None, detokenize=schema is not None))
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = [output.outputs[0] for output in self.model.generate(inputs, params, use_tqdm=False)]
        seconds = time.perf_counter() - started
        ended = [output.text for output in outputs if output.finish_reason == "stop"]
        return {"seconds": seconds, "tokens": sum(len(output.token_ids) for output in outputs), "ended": ended}

    @staticmethod
    def _input(prompt: list[int], files: list[str]) -> dict[str, Any]:
        if not files:
            return {"prompt_token_ids": prompt}
        from PIL import Image

        images = [Image.open(file).convert("RGB") for file in files]
        for image in images:  # a changed pixel gives it a new key in the embedding cache
            image.putpixel((0, 0), tuple(os.urandom(3)))
        return {"prompt_token_ids": prompt, "multi_modal_data": {"image": images}}


def main() -> None:
    os.environ.update(SETTINGS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM also prints to stdout, which is reserved for the protocol
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            peer = Peer(command["load"], command["omni"], command.get("tokenizer", False), command.get("tokens", 0))
            answer: dict[str, Any] = {"loaded": command["load"]}
        elif "schema" in command:
            assert peer is not None
            answer = peer.constrained(command["prompts"], command["schema"], command["most"])
        else:
            assert peer is not None
            seconds, tokens = peer.run(command["prompts"], command["images"], command["new_tokens"])
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            answer = {"seconds": seconds, "tokens": tokens, "peak_bytes": peak}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
