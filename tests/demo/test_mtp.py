"""The embedded model's own prediction head, through the whole service: same answers with and without it, and a good
acceptance rate."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import NemotronH_Omni_Reasoning_V3

import saccade
from demo import data
from demo.architecture import model_config
from demo.mtp import Head, export, start_weights, trunk_digest
from service.model.cache import resolve_model


def asked(client: saccade.LocalClient, seeds: range, **sampling: Any) -> list[tuple[str, list[int], str]]:
    """(text, tokens, finish reason) of captions of held-out images."""
    found = []
    for seed in seeds:
        example, out = data.question_example(seed, "caption"), io.BytesIO()
        example.pictures[0].image.save(out, "PNG")
        answer = client.generate(example.turns[-1].question, images=[out.getvalue()], max_tokens=48, **sampling)
        found.append((answer.text, list(answer.token_ids), str(answer.finish_reason)))
    return found


LIMITS: dict[str, Any] = {"dtype": "float32", "threads": 1, "graphs": "off", "max_seqs": 2, "max_len": 512}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "stop-string": {"temperature": 0, "stop": [" and", "circle"]},
    "sampled": {"temperature": 1.0, "seed": 5, "top_p": 0.95},
    "penalised": {"temperature": 0, "repetition_penalty": 1.1, "stop": ["a b"]},
}


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[str, list[int], str]]]:
    with saccade.LocalClient("demo", **LIMITS) as client:
        return {name: asked(client, range(3), **way) for name, way in WAYS.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"speculative": "mtp", "spec_state": "replay"},
        {"speculative": "mtp", "spec_state": "slots", "draft_tokens": 5},
        {"speculative": "mtp", "draft_vocab": 512},
        {"speculative": "ngram", "state_cache": "all", "state_block": 16},
    ],
    ids=["mtp-replay", "mtp-slots", "mtp-half-the-ids", "ngram-all"],
)
def test_answers_are_the_same_and_drafts_are_mostly_right(
    plain: dict[str, list[tuple[str, list[int], str]]], options: dict[str, Any]
) -> None:
    with saccade.LocalClient("demo", **LIMITS, draft_policy="fixed", **options) as client:
        for name, way in WAYS.items():
            assert asked(client, range(3), **way) == plain[name]
        stats = client._service.stats(integrity=True)["decoder"]
    if "draft_vocab" in options:
        assert stats["accepted_1"] > 20
    elif options["speculative"] == "mtp":
        assert stats["accepted_1"] > 0.6 * stats["drafted_1"] > 20


def test_transformers_passes_the_head_over() -> None:
    """The head is that of the trunk in the same checkpoint."""
    path = resolve_model("demo")
    _, info = NemotronH_Omni_Reasoning_V3.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] - {"vision_final_layernorm.weight", "vision_final_layernorm.bias"}
    assert not [key for key in info["unexpected_keys"] if not key.startswith("mtp.")]
    assert len(trunk_digest(path)) == 16


def test_training_goes_on_from_the_shipped_head(tmp_path: Path) -> None:
    """A head that is read from a model and written back gives the same file."""
    shutil.copy(resolve_model("demo") / "model.safetensors", tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    head = Head(model_config().get_text_config())
    head.load_state_dict(start_weights(tmp_path))
    export(head, tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
