"""Adapters merged while weights are loaded, against checkpoints into which they were merged before."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import linear_layers, pair, product, random_tensor, resaved, write_adapter
from lfm2_vl import make_lfm
from minicpm import make_minicpm
from quantised_checkpoint import quantise_files
from qwen_checkpoint import make_qwen
from qwen_vision import random_tower
from text_families import FAMILIES, make_text_checkpoint
from tiny_checkpoint import make_checkpoint
from tiny_decoder import greedy_params, request, run, tokens
from torch import Tensor

from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from families import CheckpointError
from kernels.linear import Quantised
from service.encoding.partner import PartnerRefused, partner_of
from service.model.adapter import Adapter
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.weight_sources import EMBEDDINGS, HEAD

OLMO = 1
"""A seed of a model with convolutions that the files have in three parts."""
Tensors = dict[str, Tensor]


def opened(model: Path, adapter: Path) -> Checkpoint:
    return Checkpoint(model, adapter=Adapter(adapter))


def weights_of(checkpoint: Checkpoint) -> Tensors:
    """All weights in float32, by native name, without prediction heads, which transformers' models do not have."""
    found = [*checkpoint.decoder_weights(), *checkpoint.vision_weights()]
    assert not any(isinstance(weight, Quantised) for _, weight in found)
    return {name: weight.float() for name, weight in found if not name.startswith("mtp.")}  # type: ignore[union-attr]


def check_equal(tiny: Any, adapter: Path, changes: Mapping[str, Tensor], folder: Path, close: float = 0) -> Tensors:
    """The weights with the adapter are bit by bit those of a model with these parameters, or `close` to them where sums
    are computed in another order. Returns them."""
    expected = weights_of(Checkpoint(resaved(tiny.path, tiny.model, folder, changes)))
    found = weights_of(opened(tiny.path, adapter))
    assert found.keys() == expected.keys()
    wrong = [name for name in found if not torch.allclose(found[name], expected[name], rtol=close, atol=close)]
    assert wrong == []
    return found


def qwen(**options: Any) -> Callable[[Path], Any]:
    return lambda path: make_qwen(path, 4, tied=False, **options)


MODELS: dict[str, Callable[[Path], Any]] = {
    **{name: lambda path, name=name: make_text_checkpoint(path, name, 1) for name in FAMILIES},  # type: ignore[misc]
    "nemotron_h": lambda path: make_checkpoint(path, 3, vision=False, text={"pattern": "M*-E"}),
    "nemotron_h_omni": lambda path: make_checkpoint(path, 3, text={"pattern": "M*"}),
    "qwen3_5": qwen(moe=False, naming="language_model.model.", vision=random_tower(random.Random(4))),
    "qwen3_5_moe": qwen(moe=True),
    "zamba2 without shared blocks": lambda path: make_text_checkpoint(path, "zamba2", 8),
    "lfm2_vl": lambda path: make_lfm(path, 1, released=True),
    "minicpmv4_6": lambda path: make_minicpm(path, 1),
}


@pytest.mark.parametrize("model", MODELS)
def test_all_linear_layers_of_a_model(tmp_path: Path, model: str) -> None:
    """The adapter is on the modules of the transformers class, whatever names and parts the files have."""
    tiny = MODELS[model](tmp_path / "model")
    layers = linear_layers(tiny.model)
    tensors = {name: value for layer in layers for name, value in pair(layer, layers[layer]).items()}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    changes = {f"{layer}.weight": weight + product(tensors, layer) for layer, weight in layers.items()}
    found = check_equal(tiny, adapter, changes, tmp_path / "merged")
    base = Checkpoint(tiny.path)
    before, served = weights_of(base), [layer for layer in layers if base.targets(f"{layer}.weight")]
    assert sum(not torch.equal(found[name], before[name]) for name in before) >= len(served) > 0.8 * len(layers)


# -- experts ---------------------------------------------------------------------------------------------------------


def experts_of(tensors: Tensors, name: str, experts: int, *, swapped: bool) -> Tensor:
    """What matrices of all experts add to a parameter, as PEFT computes it."""
    down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    down, up = down.reshape(experts, -1, down.shape[-1]), up.reshape(up.shape[0], -1, experts)
    return torch.einsum("ore,eri->eio" if swapped else "ore,eri->eoi", up, down) * (6 / 4)


def matrices(parameter: Tensor, name: str, rank: int, *, swapped: bool) -> Tensors:
    experts, out, inner = parameter.shape
    if swapped:
        out, inner = inner, out
    return {
        f"{name}.lora_A.weight": random_tensor(experts * rank, inner),
        f"{name}.lora_B.weight": random_tensor(out, rank * experts),
    }


@pytest.mark.parametrize(
    ("model", "version"),
    [("nemotron_h", "0.18.1"), ("nemotron_h", "0.19.0"), ("granitemoehybrid", "0.18.1"), ("qwen3_5_moe", "0.21.2")],
)
def test_parameters_of_experts(tmp_path: Path, model: str, version: str) -> None:
    """Of both, or of one. Files have experts one by one, or as one tensor."""
    swapped = version == "0.18.1"
    tiny = MODELS[model](tmp_path / "model")
    parameters = {name: value for name, value in tiny.model.named_parameters() if ".experts." in name}
    module = next(iter(parameters)).rpartition(".")[0]
    first = "gate_up_proj" if f"{module}.gate_up_proj" in parameters else "up_proj"
    names = {f"{module}.base_layer": f"{module}.{first}", module: f"{module}.down_proj"}
    tensors: Tensors = {}
    for name, parameter in names.items():
        tensors |= matrices(parameters[parameter], name, 4, swapped=swapped)
    settings = {"target_parameters": [f"experts.{first}", "experts.down_proj"], "peft_version": version}
    experts = len(parameters[f"{module}.down_proj"])
    changes = {
        parameter: parameters[parameter].detach() + experts_of(tensors, name, experts, swapped=swapped)
        for name, parameter in names.items()
    }
    check_equal(tiny, write_adapter(tmp_path / "both", tensors, **settings), changes, tmp_path / "of-both", 1e-6)
    tensors = matrices(parameters[f"{module}.down_proj"], module, 4, swapped=swapped)
    one = write_adapter(
        tmp_path / "one", tensors, target_parameters=["experts.down_proj"], peft_version=None
    )  # shapes tell
    changed = parameters[f"{module}.down_proj"].detach() + experts_of(tensors, module, experts, swapped=swapped)
    check_equal(tiny, one, {f"{module}.down_proj": changed}, tmp_path / "of-one", 1e-6)


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", None])
def test_the_version_decides_for_square_experts(tmp_path: Path, version: str | None) -> None:
    tiny = make_qwen(tmp_path / "model", 4, moe=True, tied=False, text={"hidden_size": 48, "moe_intermediate_size": 24})
    name = next(name for name, _ in tiny.model.named_parameters() if name.endswith("gate_up_proj"))
    module, parameter = name.rpartition(".")[0], tiny.model.get_parameter(name).detach()
    assert parameter.shape[1] == parameter.shape[2]
    tensors = matrices(parameter, module, 4, swapped=False)
    settings = {"target_parameters": ["gate_up_proj"], "peft_version": version}
    adapter = write_adapter(tmp_path / "adapter", tensors, **settings)
    added = experts_of(tensors, module, len(parameter), swapped=version != "0.19.0")
    check_equal(tiny, adapter, {name: parameter + added}, tmp_path / "merged", 1e-6)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_experts_that_were_modules(tmp_path: Path, one_by_one: bool) -> None:
    """As in transformers 4: adapters on some experts, by their numbers."""
    tiny = make_qwen(tmp_path / "model", 4, moe=True, tied=False, one_by_one=one_by_one)
    name = next(name for name, _ in tiny.model.named_parameters() if name.endswith("gate_up_proj"))
    experts, stacked = name.rpartition(".")[0], tiny.model.get_parameter(name).detach().clone()
    gate, up = stacked.chunk(2, 1)
    tensors = pair(f"{experts}.2.up_proj", up[2]) | pair(f"{experts}.0.gate_proj", gate[0])
    up[2] += product(tensors, f"{experts}.2.up_proj")
    gate[0] += product(tensors, f"{experts}.0.gate_proj")
    check_equal(tiny, write_adapter(tmp_path / "adapter", tensors), {name: stacked}, tmp_path / "merged")


# -- formulas --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Mamba-2 and attention, with biases; not tied."""
    path = tmp_path_factory.mktemp("model") / "bamba"
    tiny = make_text_checkpoint(path, "bamba", 62)
    config = tiny.model.config
    assert len(set(config.layers_block_type)) == 2 and config.attention_bias and config.mlp_bias
    assert not config.tie_word_embeddings
    return tiny


def layer_of(model: Any, name: str) -> str:
    """The module of the first layer that has one of this name."""
    return next(module for module in linear_layers(model) if module.endswith(name))


@pytest.mark.parametrize("stabilised", [False, True])
def test_ranks_and_factors_of_modules(bamba: Any, tmp_path: Path, stabilised: bool) -> None:
    """The first pattern that matches the end of a name, or the whole name, decides."""
    layers = linear_layers(bamba.model)
    query, up, down = (layer_of(bamba.model, name) for name in ("q_proj", "up_proj", "down_proj"))
    ranks = {query: 2, up: 5, down: 4}
    alphas = {query: 9.0, up: 6.0, down: 0.5}
    tensors = {name: value for layer in ranks for name, value in pair(layer, layers[layer], ranks[layer]).items()}
    adapter = write_adapter(
        tmp_path / "adapter", tensors, use_rslora=stabilised,
        rank_pattern={r"layers\.\d+\.self_attn\.(q|k)_proj": 2, f"^{up}": 5, "q_proj": 3, "_proj": 3},
        alpha_pattern={"q_proj": 9, down: 0.5},
    )  # fmt: skip
    changes = {
        f"{layer}.weight": layers[layer] + product(tensors, layer, alphas[layer] / (rank**0.5 if stabilised else rank))
        for layer, rank in ranks.items()
    }
    check_equal(bamba, adapter, changes, tmp_path / "merged")


def test_magnitudes(bamba: Any, tmp_path: Path) -> None:
    """DoRA: of rows, and of the columns of a table."""
    layer, table = layer_of(bamba.model, "up_proj"), "model.embed_tokens"
    weight, rows = linear_layers(bamba.model)[layer], bamba.model.get_input_embeddings().weight.detach()
    tensors = pair(layer, weight) | {
        f"{layer}.lora_magnitude_vector": 2 + random_tensor(len(weight)),
        f"{table}.lora_embedding_A": random_tensor(4, len(rows)),
        f"{table}.lora_embedding_B": random_tensor(rows.shape[1], 4),
        f"{table}.lora_magnitude_vector": 2 + random_tensor(rows.shape[1]),
    }
    summed = weight + product(tensors, layer)
    changed = summed * (tensors[f"{layer}.lora_magnitude_vector"] / summed.norm(dim=1))[:, None]
    embedded = rows + (tensors[f"{table}.lora_embedding_B"] @ tensors[f"{table}.lora_embedding_A"]).t() * (6 / 4)
    embedded = embedded * (tensors[f"{table}.lora_magnitude_vector"] / embedded.norm(dim=0))
    adapter = write_adapter(tmp_path / "adapter", tensors, use_dora=True)
    check_equal(bamba, adapter, {f"{layer}.weight": changed, f"{table}.weight": embedded}, tmp_path / "merged", 1e-6)


def test_whole_parameters_biases_and_rows(bamba: Any, tmp_path: Path) -> None:
    """modules_to_save, bias, lora_bias and trainable_token_indices."""
    query, up = layer_of(bamba.model, "q_proj"), layer_of(bamba.model, "up_proj")
    parameters = {name: value.detach() for name, value in bamba.model.named_parameters()}
    table = parameters["model.embed_tokens.weight"]
    tensors = pair(query, parameters[f"{query}.weight"]) | pair(up, parameters[f"{up}.weight"]) | {
        f"{query}.base_layer.bias": random_tensor(*parameters[f"{query}.bias"].shape),
        f"{query}.lora_B.bias": random_tensor(*parameters[f"{query}.bias"].shape, seed=1),
        f"{up}.lora_B.bias": random_tensor(*parameters[f"{up}.bias"].shape),
        "model.final_layernorm.weight": 1 + random_tensor(table.shape[1]),
        "lm_head.weight": random_tensor(*table.shape),
        "lm_head.modules_to_save.weight": random_tensor(*table.shape),
        "lm_head.original_module.weight": torch.zeros(1),
        "model.embed_tokens.token_adapter.trainable_tokens_delta": random_tensor(3, table.shape[1]),
    }  # fmt: skip
    changed = table.clone()
    changed[[7, 2, 90]] = tensors["model.embed_tokens.token_adapter.trainable_tokens_delta"]
    changes = {
        f"{query}.weight": parameters[f"{query}.weight"] + product(tensors, query),
        f"{query}.bias": tensors[f"{query}.base_layer.bias"] + tensors[f"{query}.lora_B.bias"] * (6 / 4),
        f"{up}.weight": parameters[f"{up}.weight"] + product(tensors, up),
        f"{up}.bias": parameters[f"{up}.bias"] + tensors[f"{up}.lora_B.bias"] * (6 / 4),
        "model.final_layernorm.weight": tensors["model.final_layernorm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
        "model.embed_tokens.weight": changed,
    }
    adapter = write_adapter(
        tmp_path / "adapter", tensors, bias="lora_only", lora_bias=True, trainable_token_indices=[7, 2, 90],
        target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head", "final_layernorm"],
    )  # fmt: skip
    check_equal(bamba, adapter, changes, tmp_path / "merged")


def test_centred_norms_and_convolutions_that_were_saved(tmp_path: Path) -> None:
    """Norms that store their weight minus 1, and a tensor that the files have in three parts."""
    tiny = make_qwen(tmp_path / "qwen", 4, moe=False, tied=False)
    norm = "model.layers.0.post_attention_layernorm.weight"
    saved = {norm: random_tensor(*tiny.model.get_parameter(norm).shape)}
    check_equal(tiny, write_adapter(tmp_path / "a", saved), saved, tmp_path / "merged")
    olmo = make_text_checkpoint(tmp_path / "olmo", "olmo_hybrid", OLMO)
    queries = next(name for name in Checkpoint(olmo.path).files.table if "q_conv1d" in name)
    replaced = {queries: torch.ones(Checkpoint(olmo.path).files.table[queries].shape)}
    native = weights_of(opened(olmo.path, write_adapter(tmp_path / "b", replaced)))
    before = weights_of(Checkpoint(olmo.path))
    [name] = [name for name in native if not torch.equal(native[name], before[name])]
    rows = len(replaced[queries])
    assert torch.equal(native[name][:rows], replaced[queries]) and torch.equal(native[name][rows:], before[name][rows:])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_once(bamba: Any, tmp_path: Path, stored: torch.dtype) -> None:
    """The sum of float32 numbers is rounded to the dtype of the decoder, whatever dtypes the files have."""
    for file in bamba.path.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    type(bamba.model).from_pretrained(bamba.path, dtype=stored).save_pretrained(tmp_path)
    layer = layer_of(bamba.model, "down_proj")
    tensors = {name: value.to(torch.bfloat16) for name, value in pair(layer, linear_layers(bamba.model)[layer]).items()}
    checkpoint = opened(tmp_path, write_adapter(tmp_path / "adapter", tensors))
    exact = {name: value.float() for name, value in tensors.items()}
    expected = linear_layers(bamba.model)[layer].to(stored).float() + product(exact, layer)
    before = dict(Checkpoint(tmp_path).decoder_weights())
    [found] = [weight for name, weight in checkpoint.decoder_weights() if not torch.equal(weight, before[name])]
    assert found.dtype == torch.float32 and torch.equal(found, expected)


# -- tied matrices ---------------------------------------------------------------------------------------------------

EMBED = "model.embed_tokens"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tiny = make_qwen(tmp_path_factory.mktemp("model") / "tied", 4, moe=False, tied=True, naming="model.")
    assert Checkpoint(tiny.path).config.decoder.tie_word_embeddings
    return tiny


def table_and_head(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    found = weights_of(checkpoint)
    assert (HEAD in found) != checkpoint.config.decoder.tie_word_embeddings
    return found[EMBEDDINGS], found.get(HEAD, found[EMBEDDINGS])


def table_pair(rows: Tensor) -> Tensors:
    return {
        f"{EMBED}.lora_embedding_A": random_tensor(4, len(rows)),
        f"{EMBED}.lora_embedding_B": random_tensor(rows.shape[1], 4),
    }


@pytest.mark.parametrize("of", ["table", "head", "both", "rows", "rows-and-head", "ensured"])
def test_tied_matrices(tied: Any, tmp_path: Path, of: str) -> None:
    """As in PEFT, unless the adapter is merged there, which changes both matrices by any change of one."""
    rows = tied.model.get_input_embeddings().weight.detach()
    tensors: Tensors = {}
    if of in ("table", "both", "ensured"):
        tensors |= table_pair(rows)
    if of in ("head", "both", "rows-and-head"):
        tensors |= pair("lm_head", rows)
    if of == "ensured":  # the same matrices the other way round
        tensors |= {
            "lm_head.lora_A.weight": tensors[f"{EMBED}.lora_embedding_B"].t(),
            "lm_head.lora_B.weight": tensors[f"{EMBED}.lora_embedding_A"].t(),
        }
    table, head = rows.clone(), rows.clone()
    indices = None
    if of.startswith("rows"):
        indices = [1, 8]
        tensors[f"{EMBED}.token_adapter.trainable_tokens_delta"] = random_tensor(2, rows.shape[1])
        table[indices] = head[indices] = tensors[f"{EMBED}.token_adapter.trainable_tokens_delta"]
    if f"{EMBED}.lora_embedding_A" in tensors:
        table += (tensors[f"{EMBED}.lora_embedding_B"] @ tensors[f"{EMBED}.lora_embedding_A"]).t() * (6 / 4)
    if "lm_head.lora_A.weight" in tensors:
        head = table if of == "ensured" else head + product(tensors, "lm_head")
    settings = {"ensure_weight_tying": of == "ensured", "trainable_token_indices": indices}
    checkpoint = opened(tied.path, write_adapter(tmp_path, tensors, **settings))
    found = table_and_head(checkpoint)
    assert torch.equal(found[0], table) and torch.equal(found[1], head)
    assert checkpoint.config.decoder.tie_word_embeddings == (of in ("rows", "ensured"))


@pytest.mark.parametrize("of", ["lm_head", EMBED])
def test_one_of_two_tied_modules_that_were_saved(tied: Any, tmp_path: Path, of: str) -> None:
    """The file may have one of them; it has to have one."""
    rows = tied.model.get_input_embeddings().weight.detach()
    settings = {"modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = write_adapter(tmp_path / "one", {f"{of}.weight": random_tensor(*rows.shape)}, **settings)
    assert opened(tied.path, adapter).merges
    layer = layer_of(tied.model, "down_proj")
    neither = write_adapter(tmp_path / "neither", pair(layer, linear_layers(tied.model)[layer]), **settings)
    with pytest.raises(CheckpointError, match="modules_to_save names 'embed_tokens', and"):
        opened(tied.path, neither)


# -- answers and identity --------------------------------------------------------------------------------------------


def answer(checkpoint: Checkpoint, **options: Any) -> list[tuple[int, float]]:
    runner = DecoderRunner(
        checkpoint.config.decoder, DecoderOptions(max_seqs=1, max_len=64, **options), checkpoint.decoder_parts()
    )
    events = run(runner, request("a", [5, 7, 9], greedy_params(8)))["a"]
    return [(token, event.logprob) for token, event in zip(tokens(events), events, strict=True)]


@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_answers_are_those_of_a_merged_checkpoint(bamba: Any, tmp_path: Path, form: str | None) -> None:
    """Quantised after the adapter is merged. The two have different versions, and their own names."""
    layers = linear_layers(bamba.model)
    tensors = {name: value for layer in layers for name, value in pair(layer, layers[layer]).items()}
    adapter = write_adapter(tmp_path / "sql", tensors)
    changes = {f"{layer}.weight": weight + product(tensors, layer) for layer, weight in layers.items()}
    merged = Checkpoint(resaved(bamba.path, bamba.model, tmp_path / "merged", changes))
    ours, base = opened(bamba.path, adapter), Checkpoint(bamba.path)
    assert answer(ours, weights=form) == answer(merged, weights=form) != answer(base, weights=form)
    assert (ours.config.name, base.config.name) == ("bamba+sql", "bamba")
    assert ours.parameters() == base.parameters()
    other = opened(bamba.path, write_adapter(tmp_path / "other", tensors, lora_alpha=7))
    again = opened(bamba.path, write_adapter(tmp_path / "again", tensors))
    assert len({base.revision, ours.revision, merged.revision, other.revision}) == 4
    assert again.revision == ours.revision


def test_an_encoder_without_the_adapter_is_no_partner(tmp_path: Path) -> None:
    tiny = make_checkpoint(tmp_path / "model", 3, text={"pattern": "M"})
    layer = layer_of(tiny.model, "mlp.fc1" if any("fc1" in name for name in linear_layers(tiny.model)) else "o_proj")
    adapter = write_adapter(tmp_path / "adapter", pair(layer, linear_layers(tiny.model)[layer]))
    ours, theirs = opened(tiny.path, adapter), Checkpoint(tiny.path)
    vision = ours.config.vision
    assert vision is not None
    with pytest.raises(PartnerRefused, match="revision is .*weights_digest is"):
        partner_of(ours, vision, torch.float32).check(partner_of(theirs, vision, torch.float32), "host:1")


def test_an_adapter_of_another_model_is_a_warning(bamba: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_of(bamba.model, "q_proj")
    tensors = pair(layer, linear_layers(bamba.model)[layer])
    for base, warned in (("ibm/Bamba/", False), ("/data/bamba", False), ("", False), ("ibm/granite", True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            opened(bamba.path, write_adapter(tmp_path / "adapter", tensors, base_model_name_or_path=base))
        assert ("ibm/granite" in caplog.text) == warned


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only adapters of the type 'LORA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"r": 0}, "r must be a whole number of at least 1, not 0"),
        ({"r": 10**9}, "r is 1000000000; at most 65536"),
        ({"r": "8"}, "r must be a whole number"),
        ({"lora_alpha": 0}, "lora_alpha must be a number above 0, not 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number above 0, not nan"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"rank_pattern": [4]}, "rank_pattern must be an object, not"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern: q_proj must be a whole number of at least 1, not -1"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern: q_proj must be a number above 0, not True"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern: '\\(' is not a regular expression"),
        ({"alpha_pattern": {"(a+)+b": 4}}, None),
        ({"use_qalora": True}, "use_qalora is True, which is not served"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the weights"),
        ({"init_lora_weights": "gaussian"}, None),
        ({"peft_version": "1" * 5000}, None),
        ({"target_parameters": "experts"}, "target_parameters must be a list of names"),
        ({"trainable_token_indices": [1, 1]}, "trainable_token_indices must be lists of different token ids"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, "trainable_token_indices must be"),
        ({"lora_bias": True}, "lora_bias is true, but .*q_proj has none: lora_B.bias"),
        ({"target_modules": 3}, "target_modules must be a list of names"),
        ({"target_modules": "("}, "target_modules: '\\(' is not a regular expression"),
        ({"target_modules": ["q_proj", "v_proj"]}, "target_modules names 'v_proj', and .*; those .* has are of q_proj"),
        ({"target_modules": ["embed_tokens"]}, "target_modules names 'embed_tokens', and adapter_model.saf"),
        ({"target_modules": ["q_proj", "w1", "gate_up_proj"]}, None),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}, None),
        ({"target_modules": r".*\.k_proj"}, "target_modules is .*k_proj', and .*; those .* has are of q_proj"),
        ({"target_modules": r"(?i)model\.layers\.\d+\.Self_Attn\.q_proj"}, None),
        ({"target_modules": "all-linear"}, None),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names 'lm_head', and .*; those .* has are of none"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set, and .*; those .* has are of none"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "trainable_token_indices names 'embed_tokens', and"),
        ({"r": 8}, "lora_A.weight and lora_B have ranks 4 and 4; adapter_config.json says 8"),
        ({"use_dora": True}, "use_dora is true, but .*q_proj has none: lora_magnitude_vector"),
    ],
)
def test_configurations(bamba: Any, tmp_path: Path, config: dict[str, Any], message: str | None) -> None:
    layer = layer_of(bamba.model, "q_proj")
    adapter = write_adapter(tmp_path, pair(layer, linear_layers(bamba.model)[layer]), **config)
    if message is None:
        assert opened(bamba.path, adapter).merges
        return
    with pytest.raises(CheckpointError, match=message):
        opened(bamba.path, adapter)


def changed(tensors: Tensors, layer: str, change: str) -> Tensors:
    down, up = tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
    infinite = up.clone()
    infinite[0, 0] = float("inf")
    return {
        "no-lora_B": {f"{layer}.lora_A.weight": down},
        "other-rank": {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up[:, :3]},
        "other-width": {f"{layer}.lora_A.weight": down[:, 1:], f"{layer}.lora_B.weight": up},
        "vectors": {f"{layer}.lora_A.weight": down[0], f"{layer}.lora_B.weight": up[0]},
        "integers": {f"{layer}.lora_A.weight": down.int(), f"{layer}.lora_B.weight": up},
        "no-such-layer": {name.replace("layers.", "layers.9"): value for name, value in tensors.items()},
        "no-such-module": {name.replace("q_proj", "r_proj"): value for name, value in tensors.items()},
        "unknown-role": {**tensors, f"{layer}.lora_C.weight": up},
        "magnitude": {**tensors, f"{layer}.lora_magnitude_vector": up[:, 0]},
        "twice-wrapped": tensors | {name.replace(".lora", ".base_layer.lora"): tensors[name] for name in tensors},
        "bias-shape": {**tensors, f"{layer}.bias": up[:3, 0]},
        "lora-bias": {**tensors, f"{layer}.lora_B.bias": up[:, 0]},
        "both-kinds": {**tensors, f"{layer}.lora_embedding_A": down, f"{layer}.lora_embedding_B": up},
        "named-twice": {**tensors, f"{layer}.lora_A": down},
        "saved-twice": {**tensors, "lm_head.weight": up, "lm_head.modules_to_save.weight": 2 * up},
        "only-original": {**tensors, "lm_head.original_module.weight": up},
        "rows": {**tensors, f"{EMBED}.token_adapter.trainable_tokens_delta": up[:2]},
        "nan": {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": infinite},
        "doubles": {f"{layer}.lora_A.weight": down.double().sign() * 1e300, f"{layer}.lora_B.weight": up},
        "overflow": {f"{layer}.lora_A.weight": down * 1e30, f"{layer}.lora_B.weight": up * 1e30},
    }[change]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no-lora_B", "of lora_A and lora_B there is only base_model.model..*lora_A.weight"),
        ("other-rank", "have ranks 4 and 3; adapter_config.json says 4"),
        ("other-width", r"have shapes \[4, \d+\] and \[\d+, 4\], which do not fit a parameter \["),
        ("vectors", "which are no matrices"),
        ("integers", "has dtype I32, not one of F32"),
        ("no-such-layer", r"the model has no parameter model\.layers\.9\d+\.self_attn\.q_proj\.weight"),
        ("no-such-module", "the model has no parameter .*r_proj"),
        ("unknown-role", "the model has no parameter .*lora_C"),
        ("magnitude", "use_dora is false, but .* has one: lora_magnitude_vector"),
        ("twice-wrapped", "has 2 pairs of lora_A and lora_B, and target_parameters names 0"),
        ("bias-shape", r"bias has shape \[3\], not \["),
        ("lora-bias", "lora_bias is false, but .*q_proj has one: .*lora_B.bias"),
        ("both-kinds", "is beside .*lora_embedding_A, so that it would not be used"),
        ("named-twice", "lora_A and .*lora_A.weight have the same name"),
        ("saved-twice", "lm_head.modules_to_save.weight and .*lm_head.weight are the same parameter, and they differ"),
        ("only-original", "lm_head.original_module.weight is there without the tensor that replaces it"),
        ("rows", "trainable_token_indices has 0 ids for its rows"),
        ("nan", "1 of .* numbers are NaN or infinite"),
        ("doubles", r"(\d+) of \1 numbers are NaN or infinite"),
        ("overflow", "numbers of the weight are NaN or infinite"),
    ],
)
def test_tensors_that_do_not_fit(bamba: Any, tmp_path: Path, change: str, message: str) -> None:
    """Before weights are read, unless it is their values."""
    layer = layer_of(bamba.model, "q_proj")
    tensors = pair(layer, linear_layers(bamba.model)[layer])
    adapter = write_adapter(tmp_path, changed(tensors, layer, change))
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint = opened(bamba.path, adapter)
        assert change in ("nan", "doubles", "overflow")
        list(checkpoint.decoder_weights())
    assert str(tmp_path) in str(error.value) or change == "overflow"


def test_more_rows_than_tokens_and_expert_numbers(tmp_path: Path) -> None:
    tiny = make_qwen(tmp_path / "model", 4, moe=True, tied=False)
    rows = tiny.model.get_input_embeddings().weight
    tensors = {f"{EMBED}.token_adapter.trainable_tokens_delta": random_tensor(1, rows.shape[1])}
    adapter = write_adapter(tmp_path / "rows", tensors, trainable_token_indices={"embed_tokens": [len(rows)]})
    with pytest.raises(CheckpointError, match=f"is for token {len(rows)}, but there are {len(rows)} tokens"):
        opened(tiny.path, adapter)
    module = next(name for name, _ in tiny.model.named_modules() if name.endswith(".experts"))
    expert = f"{module}.{len(tiny.model.get_submodule(module).down_proj)}.down_proj"
    adapter = write_adapter(tmp_path / "expert", pair(expert, tiny.model.get_submodule(module).down_proj[0]))
    with pytest.raises(CheckpointError, match=r"is for expert (\d+), but there are \1"):
        opened(tiny.path, adapter)


def test_weights_that_are_quantised_cannot_be_changed(tmp_path: Path) -> None:
    """Others of the same checkpoint can."""
    tiny = make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "M*-", "hidden_size": 32})
    small = quantise_files(tiny, tmp_path / "small", "channel-fp8")
    schemes = {weight.module: weight.scheme for weight in Checkpoint(small.path).weights.values()}
    packed = next(name for name, scheme in schemes.items() if scheme == "fp8-channel")
    layer = packed.replace("backbone.", "model.").removeprefix("language_model.")
    tensors = pair(layer, linear_layers(tiny.model)[layer])
    with pytest.raises(
        CheckpointError, match="which is stored as fp8-channel: an adapter is merged into weights of 16"
    ):
        opened(small.path, write_adapter(tmp_path / "a", tensors))
    norm = {"model.norm_f.weight": random_tensor(32)}
    found = dict(opened(small.path, write_adapter(tmp_path / "b", norm)).decoder_weights())
    assert torch.equal(found["model.norm_f.weight"], norm["model.norm_f.weight"])  # type: ignore[arg-type]


def test_parts_of_a_model_that_are_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their changes are named in the log, like their weights; an adapter of them alone is an error."""
    tiny = make_checkpoint(tmp_path / "model", 2, text={"pattern": "M"})
    sound = {name: random_tensor(4, 4) for name in ("sound_encoder.x.lora_A.weight", "sound_encoder.x.lora_B.weight")}
    layer = next(name for name in linear_layers(tiny.model) if "mixer" in name)
    with caplog.at_level(logging.INFO):
        opened(tiny.path, write_adapter(tmp_path / "a", sound | pair(layer, linear_layers(tiny.model)[layer])))
    assert "1 changes are of parts of the model that are not served, such as sound_encoder.x.weight" in caplog.text
    saved = {"sound_projection.linear.weight": random_tensor(4, 4)} | pair(layer, linear_layers(tiny.model)[layer])
    assert opened(tiny.path, write_adapter(tmp_path / "c", saved, modules_to_save=["sound_projection"])).merges
    with pytest.raises(CheckpointError, match="none of them changes a part of the model that is served"):
        opened(tiny.path, write_adapter(tmp_path / "b", sound))


def test_folders_that_are_no_adapters(bamba: Any, tmp_path: Path) -> None:
    layer = layer_of(bamba.model, "q_proj")
    adapter = write_adapter(tmp_path / "adapter", pair(layer, linear_layers(bamba.model)[layer]))
    with pytest.raises(
        CheckpointError, match="is an adapter and not a model: name the model, and the adapter with --ad"
    ):
        open_checkpoint(str(adapter))
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json: it is not an adapter in PEFT's format"):
        open_checkpoint(str(bamba.path), adapter=str(bamba.path))
    with pytest.raises(CheckpointError, match="no adapter 'nothing': it is neither a folder, nor a hub id"):
        open_checkpoint(str(bamba.path), adapter="nothing")
    with pytest.raises(CheckpointError, match="has no tensors: the adapter would change nothing"):
        open_checkpoint(str(bamba.path), adapter=str(write_adapter(tmp_path / "empty", {})))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors \(other formats are not supported\)"):
        open_checkpoint(str(bamba.path), adapter=str(adapter))
    (adapter / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        open_checkpoint(str(bamba.path), adapter=str(adapter))
