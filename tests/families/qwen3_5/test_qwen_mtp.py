"""The prediction head of published files, also of Qwen3-Next, whose head has the same names: drafts compared with
transformers' own layer, and unchanged answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen_checkpoint import make_qwen, one_layer
from safetensors.torch import load_file
from text_families import make_text_checkpoint
from tiny_checkpoint import TinyCheckpoint
from tiny_decoder import greedy_params, request, run, tokens
from torch import Tensor

from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from service.model.checkpoint import Checkpoint

NEXT = (13, 24)
"""Seeds that give Qwen3-Next a head, with experts and with an MLP."""


class Head:
    """`mtp.*` of a file, by the maths of vLLM's qwen3_5_mtp.py, on a layer of transformers."""

    def __init__(self, tiny: TinyCheckpoint, path: Path) -> None:
        self.model = tiny.model
        text = type(tiny.model)(one_layer(tiny.model.config)).float().eval()
        self.trunk = text.model
        stored = load_file(path / "model.safetensors")
        self.weights = {"mtp." + name.partition("mtp.")[2]: w for name, w in stored.items() if "mtp." in name}
        prefix = "mtp.layers.0."
        layer = {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        self.trunk.layers[0].load_state_dict(stacked(layer))
        self.axes = (3, 1, -1) if "mrope_section" in tiny.model.config.rope_parameters else (1, -1)
        self.eps = tiny.model.config.rms_norm_eps

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weights[f"mtp.{name}.weight"])

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The likeliest tokens after these."""
        hidden = self.model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
        found: list[int] = []
        for _ in range(count):
            embedded = self.model.get_input_embeddings().weight[torch.tensor([*ids, *found][1:])]
            parts = self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")
            x = torch.cat(parts, 1) @ self.weights["mtp.fc.weight"].T
            positions = torch.arange(len(x)).expand(self.axes)
            mask = torch.full((len(x),) * 2, -torch.inf).triu(1)[None, None]
            rotation = self.trunk.rotary_emb(x[None], positions)
            x = self.trunk.layers[0](x[None], position_embeddings=rotation, attention_mask=mask)
            m = self.norm((x[0] if isinstance(x, tuple) else x)[0, -1:], "norm")
            found.append(int(self.model.lm_head(m).argmax()))
            hidden = torch.cat((hidden, m))
        return found


def stacked(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a layer with its experts, which may be one by one, in transformers' two tensors."""
    kept = {name: weight for name, weight in layer.items() if ".experts." not in name or "weight" not in name}
    experts = [name.split(".")[2] for name in layer if name.endswith(".gate_proj.weight") and ".experts." in name]
    if experts:
        gates, ups, downs = (
            torch.stack([layer[f"mlp.experts.{index}.{part}_proj.weight"] for index in sorted(experts, key=int)])
            for part in ("gate", "up", "down")
        )
        kept |= {"mlp.experts.gate_up_proj": torch.cat((gates, ups), 1), "mlp.experts.down_proj": downs}
    return kept


@pytest.mark.parametrize(
    ("moe", "options"),
    [
        pytest.param(False, {}, id="dense"),
        pytest.param(True, {}, id="mixture"),
        pytest.param(False, {"native": "off", "spec_state": "slots", "max_chunk": 5}, id="dense-operations"),
        pytest.param(True, {"native": "off", "graphs": "on"}, id="mixture-graphs"),
    ],
)
def test_drafts_are_the_published_head_s_and_answers_the_plain_ones(
    tmp_path: Path, moe: bool, options: dict[str, Any]
) -> None:
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    tiny = make_qwen(tmp_path, 7, moe=moe, tied=False, naming="model.", mtp=True, one_by_one=False, text=layers)
    check_drafts(tiny, tmp_path, options)


@pytest.mark.parametrize("seed", NEXT)
def test_drafts_of_qwen_next(tmp_path: Path, seed: int) -> None:
    check_drafts(make_text_checkpoint(tmp_path, "qwen3_next", seed), tmp_path, {})


def check_drafts(tiny: TinyCheckpoint, path: Path, options: dict[str, Any]) -> None:
    head, checkpoint = Head(tiny, path), Checkpoint(path)
    asked = [request(f"r{i}", [*range(20, 29), *after], greedy_params(16)) for i, after in enumerate(([7], [3, 4], []))]

    def runner_of(**chosen: Any) -> DecoderRunner:
        common = {"max_seqs": 3, "max_len": 128, "page_size": 4, "draft_policy": "fixed", "draft_tokens": 3}
        return DecoderRunner(checkpoint.config.decoder, DecoderOptions(**common | chosen), checkpoint.decoder_weights())

    runner, seen = runner_of(speculative="mtp", **options), list[tuple[list[int], list[int]]]()
    assert runner.drafter is not None
    draft = runner.drafter.draft

    def recorded(rows: Any) -> Any:
        found = draft(rows)
        seen.extend((list(s.tokens), list(drafts)) for s, drafts in found)
        return found

    runner.drafter.draft = recorded  # type: ignore[method-assign]
    answers = {name: tokens(events) for name, events in run(runner, *asked).items()}
    assert answers == {name: tokens(events) for name, events in run(runner_of(), *asked).items()}
    assert len(seen) > 12
    for known, drafts in seen[::3]:
        assert drafts == head.drafts(known, len(drafts))
