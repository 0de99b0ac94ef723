"""The plan matches what the engine does."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from minicpm import make_minicpm
from quantised_checkpoint import quantise_files
from quantised_files import FORMATS
from qwen_checkpoint import make_qwen
from qwen_vision import random_tower
from text_families import FAMILIES, make_text_checkpoint
from tiny_checkpoint import make_checkpoint

import saccade
from decoder.arena import Arena
from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from encoder.plan import describe
from kernels.linear import Linear, Quantised
from kernels.linear.quantised import KINDS
from kernels.machine_memory import machine_memory
from kernels.native.instruction_sets import SETS, processor_features, supported
from kernels.native.structs import Kind
from service.commands.plan import plan, size, weight_bytes
from service.common.config import ConfigError, EngineOptions, ServerOptions
from service.engine.build import build_encoder, build_engine
from service.engine.runner_options import decoder_options, encoder_options
from service.model.checkpoint import open_checkpoint
from service.model.quantise import quantise_checkpoint
from service.model.resolve import resolve_vision
from service.servers.run import run as serve


def test_the_plan_agrees_with_the_arena(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M*-M"})
    options = ServerOptions(model=str(tmp_path), dtype="float32", max_seqs=5, max_len=300, threads=1)
    memory, concurrency, states, capture, encoder = plan(options)
    checkpoint = open_checkpoint(str(tmp_path))
    arena = Arena(checkpoint.config.decoder, decoder_options(options, checkpoint))
    cells = {row[0].strip(): row[1:] for row in memory.rows}
    assert cells["state arena"][0] == size(arena.total_bytes)
    assert cells["a state slot"][0] == size(arena.layout.slot_bytes)
    assert concurrency.rows[-1] == ("300", "5", "max_seqs 5")
    assert capture.rows[-1][-1] == "1, 2, 4, 5"
    held = {row[0]: row[1:] for row in states.rows}
    assert held["none"] == ("1", size(arena.layout.slot_bytes), "")
    assert held["align"] == ("2", size(2 * arena.layout.slot_bytes), "")
    assert held["auto"][2] == "in use" and int(held["all"][0]) > 2
    engine = build_engine(options)
    budgets = engine._encoding.runner.budgets  # type: ignore[union-attr]
    engine.close()
    assert [row[0] for row in encoder.rows[1:]] == [str(b) for b in budgets.token_budgets]
    assert f"{budgets.max_images} images per batch" in encoder.title


@pytest.mark.parametrize("kind", ["int8", "int8-32", "int4", "fp8", "nvfp4"])
def test_quantised_weights_are_counted_as_they_are_held(tmp_path: Path, kind: str) -> None:
    source = make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "M*-ME"})
    made = quantise_checkpoint(open_checkpoint(str(source.path)), tmp_path / "small", kind)
    at_load = ServerOptions(model=str(source.path), weights=kind)
    saved = ServerOptions(model=str(tmp_path / "small"))
    assert weight_bytes(at_load, open_checkpoint(at_load.model)) == made.after
    assert weight_bytes(saved, open_checkpoint(saved.model)) == made.after
    assert f"decoder in {kind}" in plan(at_load)[0].rows[1][2]
    assert f"in the format they are stored in: {kind}" in plan(saved)[0].rows[1][2]


def test_a_quantised_projection_that_is_tied_is_counted_with_its_table_once(tmp_path: Path) -> None:
    counted = []
    for tied in (False, True):
        text = {"pattern": "M*-", "tie_word_embeddings": tied}
        path = str(make_checkpoint(tmp_path / str(tied), 3, vision=False, text=text).path)
        options = ServerOptions(model=path, weights="int8", dtype="bfloat16")
        shapes = open_checkpoint(path).decoder_shapes()
        counted.append(weight_bytes(options, open_checkpoint(path)))
    assert counted[0] - counted[1] == 2 * math.prod(shapes["model.embeddings.weight"])


def test_states_in_bfloat16_take_half_the_memory(tmp_path: Path) -> None:
    path = str(make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "MM"}).path)
    slots = open_checkpoint(path).config.decoder.slots
    windows = sum(-(-4 * math.prod(slot.window) // 64) * 64 for slot in slots)
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        states = sum(-(-item * math.prod(slot.state) // 64) * 64 for slot in slots)
        options = ServerOptions(
            model=path,
            dtype="float32",
            device="cpu",
            max_seqs=10**6,
            max_len=64,
            memory_bytes=2**20,
            state_dtype=dtype,
            native="off",
        )
        memory, concurrency, *_ = plan(options)
        cells = {row[0].strip(): row[1:] for row in memory.rows}
        assert cells["a state slot"][0] == size(states + windows)
        assert f"states {size(states)} in {dtype}, windows {size(windows)}" in cells["a state slot"][1]
        assert concurrency.rows[-1][1:] == (
            str(2**20 // (states + windows)), f"memory ({2**20 // (states + windows)} fit)"
        )  # fmt: skip
        arena = Arena(open_checkpoint(path).config.decoder, decoder_options(options, open_checkpoint(path)))
        assert cells["state arena"][0] == size(arena.total_bytes)
        assert {state.dtype for state in arena.states} == {getattr(torch, dtype)}


def test_states_in_bfloat16_are_refused_where_they_would_do_nothing_or_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_checkpoint(tmp_path / "attention", 3, vision=False, text={"pattern": "*-"}).path)
    for run in (plan, build_engine):
        with pytest.raises(ConfigError, match="state_dtype: bfloat16 would have no effect: .* has no recurrent states"):
            run(ServerOptions(model=path, state_dtype="bfloat16", device="cpu"))
    path = str(make_checkpoint(tmp_path / "mamba", 3, vision=False, text={"pattern": "M"}).path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match="state_dtype bfloat16 needs a CPU, and the device is cuda: .*float32 would"):
        plan(ServerOptions(model=path, state_dtype="bfloat16", device="cuda"))


def test_a_grid_of_states_that_no_request_can_use_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bound that the error names is exact: at it a prompt finds a state, one token below `max_len` would not do."""
    shape = {"pattern": "M", "chunk_size": 16, "vocab_size": 99}
    path = str(make_checkpoint(tmp_path / "mamba", 3, vision=False, text=shape).path)
    options = ServerOptions(model=path, device="cpu", max_len=97, state_cache="align", state_block=96)
    shown = "state_block: .* token 96, .* at least 98 tokens, but max_len is 97; state_block of at most 80 would work"
    for run in (plan, build_engine):
        with pytest.raises(ConfigError, match=shown):
            run(options)
    assert plan(replace(options, state_block=80)) and plan(replace(options, max_len=98))
    with saccade.LocalClient(path, device="cpu", max_len=98, state_cache="align", state_block=96) as client:
        found = [client.generate([7] * 97, max_tokens=1).usage.cached_tokens for _ in range(2)]
    assert found == [0, 96]
    with pytest.raises(ConfigError, match="state_cache: .* token 16, .* max_len is 17; state_cache auto would work"):
        plan(replace(options, max_len=17, state_block=None))
    assert plan(replace(options, max_len=18, state_block=None))
    assert plan(replace(options, state_cache="auto")) and "state_block 96 has no effect with state_cache" in caplog.text
    path = str(make_checkpoint(tmp_path / "attention", 3, vision=False, text={"pattern": "*"}).path)
    assert plan(replace(options, model=path)) and "state_block 96 has no effect without recurrent" in caplog.text


@pytest.mark.parametrize("form", FORMATS)
def test_published_formats_are_counted_as_they_are_stored(tmp_path: Path, form: str) -> None:
    text = {"pattern": "M-", "hidden_size": 64, "intermediate_size": 96, "mamba_num_heads": 8, "mamba_head_dim": 8}
    plain = make_checkpoint(tmp_path / "plain", 3, vision=False, text=text)
    small = quantise_files(plain, tmp_path / "small", form).path
    checkpoint = open_checkpoint(str(small))
    assert checkpoint.formats
    row = plan(ServerOptions(model=str(small)))[0].rows[1]
    assert f"in the format they are stored in: {', '.join(checkpoint.formats)}" in row[2]
    # Unquantised numbers are counted in float32, the dtype that the checkpoint declares and stores.
    stored = sum(entry.nbytes for entry in checkpoint.files.table.values())
    assert weight_bytes(ServerOptions(model=str(small)), checkpoint) == stored
    (kind,) = {checkpoint.kind_of(name) for name in checkpoint.config.decoder.linear_weights()} - {"plain"}
    named = [each for each in KINDS if each in form]
    assert kind == (named[0] if named else "nvfp4" if form == "modelopt-w4a16" else "int4")
    rounded = ServerOptions(model=str(small), activations="int8", device="cpu")
    if kind in ("int8", "int4"):
        plan(rounded)
        return
    with pytest.raises(ConfigError, match="activations: int8 would have no effect"):
        plan(rounded)


def test_activations_in_fp8_need_weights_in_fp8_and_a_gpu(tmp_path: Path) -> None:
    path = str(make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"}).path)
    for weights, kinds in ((None, "16 or 32 bits"), ("int8", "int8")):
        with pytest.raises(ConfigError, match=f"activations: fp8 would have no effect: linear layers are in {kinds}"):
            plan(ServerOptions(model=path, activations="fp8", weights=weights))
    for run in (plan, build_engine):
        with pytest.raises(ConfigError, match="activations: fp8 needs a GPU, and the device is cpu"):
            run(ServerOptions(model=path, activations="fp8", weights="fp8", device="cpu"))


def test_activations_in_int8_need_integer_weights_and_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"}).path)
    for weights, kinds in ((None, "16 or 32 bits"), ("fp8", "fp8"), ("nvfp4", "nvfp4")):
        message = f"int8 would have no effect: linear layers are in {kinds}, not in int8 or int4;"
        with pytest.raises(ConfigError, match=message):
            plan(ServerOptions(model=path, activations="int8", weights=weights))
    for weights in ("int8", "int8-32", "int4", "int4-32"):
        plan(ServerOptions(model=path, activations="int8", weights=weights, device="cpu"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="activations: int8 needs a CPU, and the device is cuda"):
        plan(ServerOptions(model=path, activations="int8", weights="int8", device="cuda"))


@pytest.mark.parametrize("form", ["channel-int8", "packed-int4", "packed-int8"])
def test_activations_in_int8_follow_what_the_checkpoint_says(tmp_path: Path, form: str) -> None:
    text = {"pattern": "M-", "hidden_size": 64, "intermediate_size": 96, "mamba_num_heads": 8, "mamba_head_dim": 8}
    plain = make_checkpoint(tmp_path / "plain", 3, vision=False, text=text)
    small = quantise_files(plain, tmp_path / "small", form).path
    file, dynamic = small / "config.json", {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config = json.loads(file.read_text())
    for inputs, other in (
        (None, None),
        (dynamic, None),
        ({**dynamic, "symmetric": False}, "symmetric False, not symmetric True"),
        ({**dynamic, "dynamic": False, "strategy": "tensor"}, "strategy 'tensor', dynamic False, not"),
        ({**dynamic, "num_bits": 4}, "num_bits 4, not num_bits 8"),
        ({**dynamic, "type": "float"}, "type 'float', not type 'int'"),
    ):
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
        file.write_text(json.dumps(config))
        plan(ServerOptions(model=str(small)))  # rows of 16 bits, whatever the file says
        if other is None:
            plan(ServerOptions(model=str(small), activations="int8"))
            continue
        with pytest.raises(ConfigError, match=rf"int8 contradicts the checkpoint: .*config group group_0 have {other}"):
            plan(ServerOptions(model=str(small), activations="int8"))


def test_graphs_are_in_the_plan_and_refused_as_the_server_would(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M*"})
    options = ServerOptions(model=str(tmp_path), max_seqs=8, max_len=256, graphs="on", speculative="ngram")
    memory, _, _, capture = plan(options)
    engine = build_engine(options)
    stats = engine._decoder.stats()
    engine.close()
    assert stats["graphs_now"] == sum(int(row[1]) for row in capture.rows[1:])
    assert "decoder graphs" in [row[0] for row in memory.rows] and "not" not in capture.title
    with pytest.raises(ValueError, match="lower max_seqs to at most"):
        plan(ServerOptions(model=str(tmp_path), max_seqs=999, max_len=256, graphs="on", memory_bytes=10**6))


def test_memory_beside_the_arena_is_in_the_plan_and_its_sum(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M*"})

    def parts(**others: Any) -> dict[str, tuple[str, ...]]:
        options = ServerOptions(model=str(tmp_path), device="cpu", memory_bytes=2**24, threads=1, **others)
        if not options.encoder_process:
            decoder = build_engine(options)._decoder
            assert decoder.scheduler.memory.host.limit == (options.host_bytes or decoder.arena.total_bytes // 4)
            decoder.close()
        return {row[0].strip(): row[1:] for row in plan(options)[0].rows}

    plain, more = parts(), parts(host_bytes=2**30, encoder_process=True, encoder_segment_bytes=2**31)
    assert plain["preempted requests"][0] == "4.0 MiB" and "encoder segments" not in plain
    assert (more["preempted requests"][0], more["encoder segments"][0]) == ("1.0 GiB", "2.0 GiB")
    assert more["total"][0] == "3.3 GiB"
    parts(host_bytes=2**20)


def test_memory_that_binds_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M*"})
    checkpoint = open_checkpoint(str(tmp_path))
    options = ServerOptions(model=str(tmp_path), max_seqs=8, max_len=256)
    layout = Arena(checkpoint.config.decoder, decoder_options(options, checkpoint)).layout
    small = ServerOptions(
        model=str(tmp_path), max_seqs=8, max_len=256, memory_bytes=layout.blocks_for(3, 256) * layout.block_bytes
    )
    assert plan(small)[1].rows[-1] == ("256", "3", "memory (3 fit)")


def test_what_cannot_work_is_an_error_with_the_number_that_would(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M*"})
    with pytest.raises(ValueError, match="at least"):
        plan(ServerOptions(model=str(tmp_path), memory_bytes=64))
    with pytest.raises(ValueError, match="at least"):
        plan(ServerOptions(model=str(tmp_path), handoff_bytes=1))


@pytest.mark.parametrize("pattern", ["M*", "M", "*-"])
def test_ways_out_of_too_little_memory_are_options_whose_values_work(tmp_path: Path, pattern: str) -> None:
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": pattern})
    layout = Arena(open_checkpoint(str(tmp_path)).config.decoder, DecoderOptions(max_seqs=1, max_len=512)).layout

    def refusal(**others: Any) -> str:
        options = ServerOptions(**{"model": str(tmp_path), "device": "cpu", "dtype": "float32", "threads": 1, **others})
        with pytest.raises(ValueError, match="superblocks") as caught:
            plan(options)
        said = str(caught.value)
        for name, value in re.findall(r"(memory_bytes|max_len)(?: to)? at (?:least|most) (\d+)", said):
            plan(replace(options, **{name: int(value)}))
            build_engine(replace(options, **{name: int(value)})).close()
        return said.partition(" needs ")[2]

    slots, most = int(layout.slot_bytes > 0), machine_memory()
    if layout.page_bytes:
        few = (slots + 1) * layout.block_bytes
        assert re.fullmatch(
            r"\d+: set memory_bytes to at least \d+ bytes, or lower max_len to at most \d+", refusal(memory_bytes=few)
        )
        assert re.fullmatch(r"\d+: lower max_len to at most \d+", refusal(memory_bytes=few, max_len=most))
    if slots:
        assert re.fullmatch(r"\d+: set memory_bytes to at least \d+ bytes", refusal(memory_bytes=1))


def test_the_instruction_set_is_in_the_plan_and_one_that_the_processor_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"}).path)
    there = [each.name for each in supported(processor_features())]
    for name in ("auto", *there):
        options = ServerOptions(model=path, device="cpu", instruction_set=name)
        used = there[0] if name == "auto" else name
        title = plan(options)[0].title
        assert f"on cpu, compiled for {used}" in title
        assert all(other in title.split(used, 1)[1] for other in there if other != used)
    lacking = next(each.name for each in SETS if each.name not in there)
    for run in (plan, build_engine):
        with pytest.raises(ConfigError, match=f"instruction_set: {lacking} needs .* lacks; auto, .* would work"):
            run(ServerOptions(model=path, device="cpu", instruction_set=lacking))
        with pytest.raises(ConfigError, match=f"instruction_set: {lacking} needs"):
            run(ServerOptions(model=path, device="cpu", instruction_set=lacking, native="off"))
    assert "compiled" not in plan(ServerOptions(model=path, device="cpu", native="off"))[0].title
    assert "tested under an emulator" not in plan(ServerOptions(model=path, device="cpu"))[0].title
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "without compiled code: there is no C++ compiler" in plan(ServerOptions(model=path, device="cpu"))[0].title
    with pytest.raises(
        ConfigError, match="native: 'on' is not possible: there is no C.. compiler .*; 'auto' would work"
    ):
        plan(ServerOptions(model=path, device="cpu", native="on"))


@needs_compiled
def test_compiled_code_that_a_model_or_options_rule_out_is_an_error_of_the_plan_too(tmp_path: Path) -> None:
    tower = random_tower(random.Random(3)) | {"intermediate_size": 33}
    odd = str(make_qwen(tmp_path / "qwen", 3, vision=tower).path)
    plain = str(make_checkpoint(tmp_path / "omni", 3, text={"pattern": "M*"}).path)
    options = ServerOptions(model=plain, device="cpu", native="on", threads=1)
    refused = {
        "intermediate_size 33 is odd": replace(options, model=odd, dtype="bfloat16"),
        "with graphs, states in bfloat16 are computed by torch": replace(options, graphs="on", state_dtype="bfloat16"),
    }
    for why, given in refused.items():
        for run in (plan, build_engine):
            with pytest.raises(ValueError, match=f"native: 'on' is not possible: {why}.*; 'auto' would work"):
                run(given)
        assert plan(replace(given, native="auto"))
    assert plan(options) and plan(
        replace(options, model=odd, dtype="bfloat16", role="decoder", encoders=("localhost:1",))
    )


def test_a_context_that_holds_no_image_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_minicpm(tmp_path, 3)
    vision = open_checkpoint(str(tmp_path), None, outline=True).config.vision
    assert vision is not None and vision.min_image_tokens > 2
    options = ServerOptions(model=str(tmp_path), device="cpu", threads=1, max_len=vision.min_image_tokens + 1)
    for run in (plan, build_engine):
        run(options)
        assert "no image fits" not in caplog.text
        run(replace(options, max_len=vision.min_image_tokens))
        least = vision.min_image_tokens
        assert f"no image fits a context of {least} tokens: the smallest takes {least}, and an answer" in caplog.text
        caplog.clear()


def test_without_attention_no_context_is_too_long_to_keep(tmp_path: Path) -> None:
    """Nothing grows with it: there are no pages, so there are no tables of them."""
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"})
    options = ServerOptions(model=str(tmp_path), max_len=2**31 - 1, max_seqs=64, threads=1)
    assert plan(options)[1].rows[-1] == (str(2**31 - 1), "64", "max_seqs 64")
    engine = build_engine(options)
    assert engine.info.max_len == 2**31 - 1
    engine.close()


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_a_role_plans_for_what_it_serves(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M*-M"})
    checkpoint = open_checkpoint(str(tmp_path))
    both = ServerOptions(model=str(tmp_path))
    encoder = ServerOptions(model=str(tmp_path), role="encoder")
    decoder = ServerOptions(model=str(tmp_path), role="decoder", encoders=("localhost:1",))
    titles = {options.role: [table.title for table in plan(options)] for options in (both, encoder, decoder)}
    assert titles["all"][1:-1] == titles["decoder"][1:] and titles["encoder"][1:] == titles["all"][-1:]
    assert titles["decoder"][0].endswith("role decoder")
    parts = [weight_bytes(options, checkpoint) for options in (encoder, decoder)]
    assert min(parts) > 0 and sum(parts) == weight_bytes(both, checkpoint)
    assert [row[0] for row in plan(encoder)[0].rows] == ["part", "weights", "handoff", "total"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"handoff_bytes": 1}, "handoff_bytes: 1 holds 0 image tokens"),
        ({"video_pruning_rate": 1.5}, "video_pruning_rate: 1.5 is not at least 0 and below 1"),
        ({"encoder_process": True, "encoder_segment_bytes": 2**16}, "encoder_segment_bytes: 65536 does not hold"),
    ],
)
def test_options_of_images_are_refused_as_the_server_would(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    checkpoint = make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    rule = {"patch_size": checkpoint.patch_size, "min_num_patches": 2**14, "max_num_patches": 2**15}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rule))
    decoder = {} if "encoder_process" in other else {"role": "decoder", "encoders": ("localhost:1",)}
    options = ServerOptions(**{"model": str(tmp_path), "device": "cpu", "max_len": 2**14, **decoder, **other})
    for run in (plan, build_engine):
        with pytest.raises(ConfigError, match=message):
            run(options)


@pytest.mark.parametrize("role", ["all", "encoder"])
def test_a_step_of_the_encoder_that_cannot_be_is_an_error_with_one_that_can(tmp_path: Path, role: str) -> None:
    checkpoint = make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    rule = {"patch_size": checkpoint.patch_size, "min_num_patches": 64, "max_num_patches": 256}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rule))

    def options(step: int, **others: Any) -> ServerOptions:
        return ServerOptions(model=str(tmp_path), threads=1, role=role, encoder_step_tokens=step, **others)

    def build(options: EngineOptions) -> None:
        (build_engine(options) if role == "all" else build_encoder(options)[0]).close()

    for run in (plan, build):
        with pytest.raises(ConfigError, match="encoder_step_tokens: 15 is less than the 16 image .*; at least 16 "):
            run(options(15))
        with pytest.raises(ConfigError, match="encoder_step_tokens: 2147483647 takes .* of memory of .*; 64, the"):
            run(options(2**31 - 1))
        for possible in (options(16), options(64), options(2**31 - 1, token_budgets=(64,))):
            run(possible)


def test_the_memory_of_an_encoder_step_counts_the_patches_of_videos(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "M"})
    options = ServerOptions(model=str(tmp_path), dtype="float32", encoder_step_tokens=2**31 - 1)
    with pytest.raises(ConfigError, match="takes about") as refused:
        plan(options)
    checkpoint = open_checkpoint(options.model)
    vision = resolve_vision(options, checkpoint)
    assert vision is not None and vision.patch_widths["video"] > vision.patch_widths["image"]
    (*_, largest) = describe(vision, encoder_options(options, checkpoint).budgets(vision), torch.float32, ("video",))
    assert f"takes about {largest.buffer_bytes + largest.activation_bytes} bytes" in str(refused.value)


def test_an_encoder_needs_no_options_of_a_decoder(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "*-"})
    decoder = {"activations": "int8", "state_dtype": "bfloat16", "draft_vocab": 9, "memory_share": 0.0}
    options = ServerOptions(**{"model": str(tmp_path), "device": "cpu", "role": "encoder", **decoder})
    build_encoder(options)[0].close()
    assert [row[0] for row in plan(options)[0].rows] == ["part", "weights", "handoff", "total"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"max_inflight_bytes": 4096, "dtype": "float32"}, "max_inflight_bytes: 4096 is 1024 bytes of pixels for each"),
        ({"max_message_bytes": 2048}, "max_message_bytes: 2048 is too small .*; at least 1048640 would work"),
    ],
)
def test_a_plan_refuses_an_encoder_that_no_decoder_could_use(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    make_checkpoint(tmp_path, 3, text={"pattern": "*-"})
    options = ServerOptions(**{"model": str(tmp_path), "device": "cpu", "role": "encoder", "port": 0, **other})
    for run in (plan, serve):
        with pytest.raises(ConfigError, match=message):
            run(options)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_a_role_without_images_is_refused(tmp_path: Path, role: str) -> None:
    make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M*-M"})
    encoders = ("localhost:1",) if role == "decoder" else ()
    with pytest.raises(ConfigError, match="role: .* takes no images.*'all' would work"):
        plan(ServerOptions(model=str(tmp_path), role=role, encoders=encoders))


@pytest.mark.parametrize("hidden", [64, 128])
def test_what_compiled_code_stores_in_12_bits(hidden: int, tmp_path: Path) -> None:
    """Linear layers, and the table of embeddings if its rows can be panels."""
    sets = [one for one in supported(processor_features()) if one.compact_weights]
    if not sets:
        pytest.skip("no instruction set of this processor has products of such weights")
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 128,
    }
    path = str(make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "*-", **sizes}).path)
    options = ServerOptions(model=path, dtype="bfloat16", instruction_set=sets[0].name)
    engine = build_engine(options)
    model = engine._decoder.model
    mixers = [mixer for layer in model.trunk.layers for mixer in layer.mixers]
    linear = [one for mixer in mixers for one in vars(mixer).values() if isinstance(one, Linear)] + [model.trunk.head]
    stored = [one.packed for one in linear if one.packed is not None]
    assert len(stored) == 5 and all(packed.stored is Kind.COMPACT_BF16 for packed in stored)
    numbers, table = sum(packed.n * packed.k for packed in stored), 128 * hidden if hidden == 128 else 0
    assert (model.trunk.embeddings.packed is not None) == bool(table)
    engine.close()

    def cell(**others: str) -> str | None:
        rows = plan(ServerOptions(**{"model": path, "dtype": "bfloat16", **others}))[0].rows
        return {row[0].strip(): row[1] for row in rows}.get("as compiled code")

    def less(saved: int, **others: str) -> str | None:
        options = ServerOptions(**{"model": path, "dtype": "bfloat16", **others})
        return size(weight_bytes(options, open_checkpoint(path)) - saved // 2) if saved else None

    assert cell(instruction_set=sets[0].name) == less(numbers + table)
    assert cell(weights="int8") == less(table, weights="int8")
    assert cell(instruction_set="avx2") == less(table)
    assert cell(dtype="float32") is None and cell(native="off") is None


def _text_model(family: str, path: Path, seed: int) -> object:
    return make_text_checkpoint(path, family, seed)


MODELS: dict[str, Callable[[Path, int], object]] = {
    **{family: partial(_text_model, family) for family in FAMILIES},
    "nemotron_h": lambda path, seed: make_checkpoint(
        path, seed, vision=False, text={"pattern": "M*-E", "moe_latent_size": 16}
    ),
    "qwen3_5": lambda path, seed: make_qwen(path, seed, moe=False, mtp=True),
    "qwen3_5_moe": lambda path, seed: make_qwen(path, seed, moe=True),
}  # fmt: skip


def quantised_below(owner: object) -> list[Quantised]:
    """The quantised weights that an object, or what it refers to, holds."""
    found: dict[int, Quantised] = {}
    seen: dict[int, object] = {}
    left = [owner]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Quantised):
            found[id(each)] = each
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
        elif type(each).__module__.partition(".")[0] in ("decoder", "kernels"):
            left += vars(each).values() if hasattr(each, "__dict__") else []
    return list(found.values())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_the_bytes_of_weights_are_those_that_loading_allocates(tmp_path: Path, model: str, seed: int) -> None:
    """In every family the decoder quantises the layers that the plan counts as such, and those alone, and a quantised
    file has the same. Compiled code has no products of fp8 with float16, so that weights stay as they are quantised."""
    MODELS[model](tmp_path / "model", seed)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    decoder = checkpoint.config.decoder
    drafting = "mtp" if decoder.mtp else "none"
    loading = DecoderOptions(
        dtype=torch.float16, weights="fp8", speculative=drafting, max_seqs=1, max_len=64, native="off"
    )
    quantised = quantised_below(DecoderRunner(decoder, loading, checkpoint.decoder_weights()))
    plain = checkpoint.parameters() - sum(weight.shape.numel() for weight in quantised)
    allocated = 4 * plain + sum(weight.nbytes for weight in quantised)
    options = ServerOptions(model=str(tmp_path / "model"), weights="fp8", dtype="float32", speculative=drafting)
    assert weight_bytes(options, checkpoint) == allocated
    written = quantise_checkpoint(checkpoint, tmp_path / "small", "fp8")
    assert written.after == allocated
    small = open_checkpoint(str(tmp_path / "small"))
    assert weight_bytes(replace(options, model=str(tmp_path / "small"), weights=None), small) == allocated


def test_a_prediction_head_takes_memory_only_if_it_drafts(tmp_path: Path) -> None:
    make_qwen(tmp_path, 5, moe=False, mtp=True)
    checkpoint, bytes_of = open_checkpoint(str(tmp_path)), {}
    for drafting in ("none", "ngram", "mtp"):
        options = ServerOptions(model=str(tmp_path), dtype="float32", speculative=drafting)
        bytes_of[drafting] = weight_bytes(options, checkpoint)
        count = checkpoint.parameters(drafts=drafting == "mtp")
        assert f"{count / 1e6:.1f} M parameters" in plan(options)[0].rows[1][2]
    numbers = sum(math.prod(shape) for shape in checkpoint.config.decoder.mtp_weights().values())
    assert bytes_of["none"] == bytes_of["ngram"] == bytes_of["mtp"] - 4 * numbers


def test_weights_of_the_wanted_kind_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    """They are not quantised again while they are loaded, whatever their groups are."""
    source = make_checkpoint(tmp_path / "model", 3, vision=False, text={"pattern": "M*-", "hidden_size": 64})
    quantise_checkpoint(open_checkpoint(str(source.path)), tmp_path / "small", "int4-32")
    small = str(tmp_path / "small")
    fine, coarse = (
        weight_bytes(ServerOptions(model=small, dtype="float32", weights=form), open_checkpoint(small))
        for form in (None, "int4")
    )
    assert fine == coarse
