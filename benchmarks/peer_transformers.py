"""The peer's side of `benchmarks.compare`: transformers in a process of its own, one JSON command a line on stdin.

    {"load": DIR, "omni": bool, "device": "cpu" | "cuda"}        -> {"parameters": N}
    {"prompts": [[id, ...], ...], "images": [[file, ...], ...],
     "new_tokens": N}                                            -> {"seconds": s, "firsts": [s, ...], "tokens": n,
                                                                     "peak_bytes": n}

`firsts`: for each request, seconds from the common start to its first token. `peak_bytes`: peak memory of the process,
and of the GPU if it uses one.

Prompts of equal length run as one batch, others one after another, which is the library's fastest way.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels.cores import available_cores


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class FirstToken:
    """A stopping criterion for `generate`: never stops, and records the time of its first call."""

    def __init__(self, device: torch.device) -> None:
        self.at, self._device = 0.0, device

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not self.at:
            synchronise(self._device)
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Peer:
    """One loaded model."""

    def __init__(self, path: str, omni: bool, device: str) -> None:
        config = json.loads((Path(path) / "config.json").read_text())
        self.qwen = config["model_type"] == "qwen3_5"
        self.device = torch.device(device)
        self.model = _kind(config["model_type"]).from_pretrained(path, dtype=torch.bfloat16).eval().to(self.device)
        self.vision: Any = None
        if omni and self.qwen:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            self.vision = Qwen2VLImageProcessorPil.from_pretrained(path)
        elif omni:
            from service.model.checkpoint import Checkpoint

            self.vision = Checkpoint(Path(path)).config.vision

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], images: list[list[str]], new_tokens: int) -> tuple[float, list[float], int]:
        """Seconds, seconds to each first token, and output tokens. Decoding and resizing of images is not timed, in the
        peer's favour."""
        inputs = [self._inputs(prompt, files) for prompt, files in zip(prompts, images, strict=True)]
        started = time.perf_counter()
        if not any(images) and len({len(prompt) for prompt in prompts}) == 1:
            inputs = [{"input_ids": torch.cat([i["input_ids"] for i in inputs])}]
        tokens, firsts = 0, list[float]()
        for entry in inputs:
            clock = FirstToken(self.device)
            entry["attention_mask"] = torch.ones_like(entry["input_ids"])
            output = self.model.generate(
                **entry, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, use_cache=True,
                stopping_criteria=[clock],
            )  # fmt: skip
            synchronise(self.device)
            firsts += [clock.at - started] * output.shape[0]
            tokens += output.shape[0] * (output.shape[1] - entry["input_ids"].shape[1])
        return time.perf_counter() - started, firsts, tokens

    def _inputs(self, prompt: list[int], files: list[str]) -> dict[str, torch.Tensor]:
        if not files:
            return {"input_ids": torch.tensor([prompt], device=self.device)}
        assert self.vision is not None
        if self.qwen:
            return self._qwen_inputs(prompt, files)
        from encoder.images import decode_image

        images = [self.vision.image_rule.patchify(decode_image(Path(f).read_bytes()), torch.bfloat16) for f in files]
        token = self.model.config.image_token_id
        sizes = iter(images)
        widened = [i for t in prompt for i in ([t] * next(sizes).tokens if t == token else [t])]
        given = {
            "input_ids": torch.tensor([widened]),
            "pixel_values": torch.cat([image.patches for image in images]),
            "image_grid_hw": torch.tensor([image.grid for image in images]),
        }
        return {name: tensor.to(self.device) for name, tensor in given.items()}

    def _qwen_inputs(self, prompt: list[int], files: list[str]) -> dict[str, torch.Tensor]:
        from PIL import Image

        found = self.vision(images=[Image.open(file).convert("RGB") for file in files], return_tensors="pt")
        token, merged = self.model.config.image_token_id, self.vision.merge_size**2
        sizes = iter((found["image_grid_thw"].prod(1) // merged).tolist())
        widened = torch.tensor([[i for t in prompt for i in ([t] * next(sizes) if t == token else [t])]])
        given = {
            "input_ids": widened,
            "pixel_values": found["pixel_values"].to(torch.bfloat16),
            "image_grid_thw": found["image_grid_thw"],
            "mm_token_type_ids": (widened == token).int(),
        }
        return {name: tensor.to(self.device) for name, tensor in given.items()}


def _kind(model_type: str) -> Any:
    """transformers' class for a model."""
    if model_type == "qwen3_5":
        from transformers import Qwen3_5ForConditionalGeneration

        return Qwen3_5ForConditionalGeneration
    if model_type == "lfm2_vl":
        from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlForConditionalGeneration

        return Lfm2VlForConditionalGeneration
    if model_type == "nemotron_h_omni":
        from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

        return NemotronH_Omni_Reasoning_V3
    from transformers import NemotronHForCausalLM

    return NemotronHForCausalLM


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(available_cores().usable)
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            peer = Peer(command["load"], command["omni"], command["device"])
            answer: dict[str, Any] = {"parameters": sum(p.numel() for p in peer.model.parameters())}
        else:
            assert peer is not None
            seconds, firsts, tokens = peer.run(command["prompts"], command["images"], command["new_tokens"])
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if peer.device.type == "cuda":
                peak += torch.cuda.max_memory_allocated(peer.device)
            answer = {"seconds": seconds, "firsts": firsts, "tokens": tokens, "peak_bytes": peak}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
