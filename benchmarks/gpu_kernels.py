"""The part `kernels` of `benchmarks.gpu`: each operation at the sizes of three decoders and two vision towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import gpu_peers
from benchmarks.gpu_setting import Record, Setting, timed
from kernels.causal_conv1d import causal_conv1d_update
from kernels.chunk_scan import chunk_scan, plan_chunks
from kernels.gated_delta import delta_gates, gated_delta_scan, gated_delta_update
from kernels.gated_norm import gated_norm
from kernels.linear import Linear
from kernels.moe import Experts, reference, route_softmax, run_experts
from kernels.paged_attention import decode_attention, extend_attention
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import shuffle_norm
from kernels.rms_norm import add_rms_norm
from kernels.rope import Rope
from kernels.rotary import norm_rotate, rope_table
from kernels.sample import Masks, RowParams, sample
from kernels.scan_tables import ScanTables
from kernels.selective_state_update import selective_state_update
from kernels.shapes import NANO_3_OMNI, NANO_V2_12B_VL, QWEN_35B_A3B, ModelShape
from kernels.varlen_attention import varlen_attention


@dataclass(frozen=True)
class Measure:
    """One operation: its bytes and FLOPs, Saccade's call, and other projects' equivalent calls by project name."""

    name: str
    call: Callable[[], object]
    bytes: float = 0.0
    flops: float = 0.0
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    changes: tuple[torch.Tensor, ...] = ()
    """Tensors that a call updates in place."""


def kernel_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """The operations of a decoder layer."""
    rows = setting.pick(8192, 16)
    hidden = shape.hidden
    x, delta, weight = setting.random(rows, hidden), setting.random(rows, hidden), torch.ones(hidden).to(setting.device)
    yield Measure("add_rms_norm", lambda: add_rms_norm(x, delta, weight, 1e-5), bytes=8.0 * rows * hidden)
    rule = shape.delta_value_heads > 0
    inner = shape.delta_value_heads * shape.delta_head_dim if rule else shape.mamba_inner
    group = shape.delta_head_dim if rule else inner // shape.groups
    y, gate, scale = setting.random(rows, inner), setting.random(rows, inner), torch.ones(inner).to(setting.device)
    yield Measure(
        "gated_norm", lambda: gated_norm(y, gate, scale, group, 1e-5, norm_first=rule), bytes=6.0 * rows * inner
    )
    if rule:
        yield from delta_measures(setting, shape)
    else:
        for batch in (1, 32, 64, 256) if setting.full else (2,):
            yield from update_measures(setting, shape, batch)
        yield scan_measure(setting, shape)
    yield from attention_measures(setting, shape)
    yield from product_measures(setting, shape)
    if shape.experts:
        yield from expert_measures(setting, shape)
    logits = setting.random(setting.pick(64, 2), shape.vocab if setting.full else 500)
    rows = logits.shape[0]
    whole = torch.zeros(rows, dtype=torch.int64, device=setting.device)
    words = torch.full((rows, -(-logits.shape[1] // 32)), 0x11111111, dtype=torch.int32, device=setting.device)
    masks = Masks(words, torch.arange(rows, device=setting.device))
    for name, top_p, mask in (("plain", 1.0, None), ("top-p", 0.9, None), ("masked", 1.0, masks)):
        reals = [torch.full((rows,), v, dtype=torch.float64, device=setting.device) for v in (1.0, top_p, 0.0)]
        params = RowParams(reals[0].float(), whole, reals[1], reals[2], whole, whole, whole, mask)
        yield Measure(f"sample {name}", partial(sample, logits, params), bytes=2.0 * logits.numel())


def update_measures(setting: Setting, shape: ModelShape, batch: int) -> Iterator[Measure]:
    """One token per row: reads and writes state and window."""
    heads, width = shape.mamba_heads, shape.mamba_head_dim
    slots = torch.randperm(batch, device=setting.device)
    pool = setting.random(batch, heads, width, shape.state, dtype=torch.float32)
    b, c = (setting.random(batch, shape.groups, shape.state) for _ in range(2))
    x, dt = setting.random(batch, heads, width), setting.random(batch, heads)
    decay, skip, bias = (-torch.rand(heads, device=setting.device) for _ in range(3))
    yield Measure(
        f"selective_state_update b{batch}",
        lambda: selective_state_update(pool, slots, x, dt, decay, b, c, skip, bias),
        bytes=8.0 * pool.numel(),
        peers=update_peers(setting, pool, slots, (x, dt, decay, b, c, skip, bias)),
        changes=(pool,),
    )
    windows = setting.random(batch, shape.conv - 1, shape.conv_channels)
    taps, new = setting.random(shape.conv, shape.conv_channels, dtype=torch.float32), windows[:, 0].contiguous()
    yield Measure(
        f"causal_conv1d_update b{batch}",
        lambda: causal_conv1d_update(new, taps, None, windows, slots),
        bytes=4.0 * windows.numel() + 4.0 * new.numel(),
        peers=convolution_peers(setting, windows, slots, new, taps),
        changes=(windows,),
    )


Calls = dict[str, Callable[[], object]]


def update_peers(setting: Setting, pool: torch.Tensor, slots: torch.Tensor, given: tuple[torch.Tensor, ...]) -> Calls:
    """mamba-ssm and vLLM recognise one step size per head by strides of 0 over the channels."""
    x, dt, decay, b, c, skip, bias = given
    width, state = pool.shape[2:]
    wide_dt, wide_decay = dt[:, :, None].expand_as(x), decay[:, None, None].expand(-1, width, state)
    wide_skip, wide_bias = (value[:, None].expand(-1, width) for value in (skip, bias))
    calls: Calls = {}
    places = slots.int()
    if mamba := peer(setting, "mamba-ssm", "ops.triton.selective_state_update", "selective_state_update"):
        calls["mamba-ssm"] = lambda: mamba(pool, x, wide_dt, wide_decay, b, c, wide_skip, None, wide_bias, True, places)
    if vllm := peer(setting, "vllm", "model_executor.layers.mamba.ops.mamba_ssm", "selective_state_update"):
        out = torch.empty_like(x)

        def updated() -> torch.Tensor:
            vllm(
                pool, x, wide_dt, wide_decay, b, c, wide_skip, wide_bias, dt_softplus=True,
                state_batch_indices=places, out=out,
            )  # fmt: skip
            return out

        calls["vllm"] = updated
    return calls


def convolution_peers(
    setting: Setting, windows: torch.Tensor, slots: torch.Tensor, new: torch.Tensor, taps: torch.Tensor
) -> Calls:
    """vLLM's convolution window has the last two dimensions swapped."""
    vllm = peer(setting, "vllm", "model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_update")
    if vllm is None:
        return {}
    weight, places, out = taps.t().contiguous().to(new.dtype), slots.int(), torch.empty_like(new)
    return {
        "vllm": lambda: vllm(new, windows.transpose(1, 2), weight, None, "silu", conv_state_indices=places, out=out)
    }


def peer(setting: Setting, package: str, module: str, name: str) -> Callable[..., object] | None:
    """A fetched peer's function. None if it has not been fetched or this device runs no Triton. Import errors are
    raised when it is called."""
    if not gpu_peers.runnable(setting.device):
        return None
    try:
        return gpu_peers.function(package, module, name)
    except Exception as error:
        failure = error

        def fail(*_: Any, **__: Any) -> object:
            raise failure

        return fail


def scan_measure(setting: Setting, shape: ModelShape) -> Measure:
    """Four sequences from an empty state."""
    rows, length, chunk = 4, setting.pick(2048, 24), setting.pick(shape.chunk, 8)
    heads, width, groups, state = shape.mamba_heads, shape.mamba_head_dim, shape.groups, shape.state
    tokens = rows * length
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    x = setting.random(tokens, heads, width, dtype=dtype)
    b, c = (setting.random(tokens, groups, state, dtype=dtype) for _ in range(2))
    dt = torch.rand(tokens, heads, device=setting.device) / 10
    decay, skip = (-torch.rand(heads, device=setting.device) for _ in range(2))
    pool = setting.random(rows, heads, width, state, dtype=torch.float32)
    slots, fresh = torch.arange(rows, device=setting.device), torch.zeros(rows, dtype=torch.bool).to(setting.device)
    lengths, computed = [length] * rows, [0] * rows
    chunks = plan_chunks(lengths, computed, chunk)
    tables = ScanTables.of(lengths, computed, chunk, device=setting.device)
    inside = chunk * (groups * state + heads * width)
    return Measure(
        f"chunk_scan {tokens}",
        lambda: chunk_scan(pool, slots, fresh, x, dt, decay, b, c, skip, chunks, (), tables),
        flops=float(tokens * (inside + 4 * heads * width * state)),
        peers=scan_peers(setting, pool, (x, dt, decay, b, c, skip), rows, chunk),
        changes=(pool,),
    )


def scan_peers(setting: Setting, pool: torch.Tensor, given: tuple[torch.Tensor, ...], rows: int, chunk: int) -> Calls:
    """Rows of equal length: mamba-ssm takes them as a batch; vLLM, like Saccade, takes them packed, with tables
    computed before."""
    x, dt, decay, b, c, skip = given
    tokens, device = x.shape[0], x.device
    apart = [value.view(rows, tokens // rows, *value.shape[1:]) for value in (x, dt, b, c)]
    calls: Calls = {}
    if mamba := peer(setting, "mamba-ssm", "ops.triton.ssd_combined", "mamba_chunk_scan_combined"):
        calls["mamba-ssm"] = lambda: mamba(
            apart[0], apart[1], decay, apart[2], apart[3], chunk, D=skip, return_final_states=True
        )
    if vllm := peer(
        setting, "vllm", "model_executor.layers.mamba.ops.ssd_combined", "mamba_chunk_scan_combined_varlen"
    ):
        starts = list(range(0, tokens + 1, tokens // rows))
        chunks = [(row, at) for row in range(rows) for at in range(starts[row], starts[row + 1], chunk)]
        last = [max(i for i, (owner, _) in enumerate(chunks) if owner == row) for row in range(rows)]
        tables = [starts, [*(at for _, at in chunks), tokens], last, [row for row, _ in chunks]]
        starts_R, chunks_C, last_R, rows_C = (torch.tensor(t, dtype=torch.int32, device=device) for t in tables)
        out, slots = torch.empty_like(x), torch.arange(rows, dtype=torch.int32, device=device)

        def scanned() -> torch.Tensor:
            vllm(
                x, dt, decay, b, c, chunk, starts_R, chunks_C, last_R, rows_C, out, D=skip, state_dtype=torch.float32,
                final_states_out=pool, final_state_indices=slots,
            )  # fmt: skip
            return out

        calls["vllm"] = scanned
    return calls


def delta_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """The gated delta rule with one token per row and with four prompts, and the rotary embedding of queries and
    keys."""
    heads, keys, width = shape.delta_value_heads, shape.delta_key_heads, shape.delta_head_dim
    rate, bias = (-torch.rand(heads, device=setting.device) for _ in range(2))

    def tokens_of(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k = (setting.random(tokens, keys, width) for _ in range(2))
        v = setting.random(tokens, heads, width)
        b, a = (setting.random(tokens, heads) for _ in range(2))
        return q, k, v, b, a

    for batch in (1, 32, 64, 256) if setting.full else (2,):
        pool, slots = setting.random(batch, heads, width, width, dtype=torch.float32), torch.randperm(batch)
        given = (pool, slots.to(setting.device), *tokens_of(batch), rate, bias)
        yield Measure(
            f"gated_delta_update b{batch}",
            partial(gated_delta_update, *given),
            bytes=8.0 * pool.numel(),
            changes=(pool,),
        )
    rows, length, chunk = 4, setting.pick(2048, 24), setting.pick(shape.chunk, 8)
    lengths, computed, tokens = [length] * rows, [0] * rows, rows * length
    states, slots = setting.random(rows, heads, width, width, dtype=torch.float32), torch.arange(rows)
    fresh, (q, k, v, b, a) = torch.zeros(rows, dtype=torch.bool).to(setting.device), tokens_of(tokens)
    tables = ScanTables.of(lengths, computed, chunk, device=setting.device)
    prompt = (states, slots.to(setting.device), fresh, q, k, v, *delta_gates(b, a, rate, bias))
    yield Measure(
        f"gated_delta_scan {tokens}",
        lambda: gated_delta_scan(*prompt, plan_chunks(lengths, computed, chunk), (), tables),
        flops=float(tokens * heads * (6 * width * width + 10 * chunk * width + 10 * chunk * chunk)),
        changes=(states,),
    )
    count, size, half = shape.heads + shape.kv_heads, shape.head_dim, min(shape.rope_dims, shape.head_dim) // 2
    x, weight = setting.random(tokens, count, size), torch.ones(size, device=setting.device)
    table = rope_table(Rope(2 * half, 1e7), length, str(setting.device))
    at = torch.arange(tokens, device=setting.device)[:, None].expand(-1, 3) % length
    turned = (x, shape.heads, (weight, weight), 1e-6, table, at, shape.rope_axes[:half])
    yield Measure("norm_rotate", lambda: norm_rotate(*turned), bytes=4.0 * x.numel())


def attention_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """Decode at two lengths; a prompt, compared with torch's fused attention."""
    heads, kv_heads, width, scale = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5
    for rows, length in ((64, 4096), (1, 131072)) if setting.full else ((2, 40),):
        pages = -(-length // 16)
        pool = setting.random(rows * pages, 2, 16, kv_heads, width)
        tables = torch.randperm(rows * pages, device=setting.device).view(rows, pages)
        q, lengths = setting.random(rows, heads, width), torch.full((rows,), length, device=setting.device)
        yield Measure(
            f"decode_attention b{rows} {length}",
            partial(decode_attention, q, pool, tables, lengths, scale, length),
            bytes=4.0 * rows * length * kv_heads * width,
        )
    tokens = setting.pick(8192, 40)
    q, k, v = (setting.random(tokens, n, width) for n in (heads, kv_heads, kv_heads))
    pages = -(-tokens // 16)
    pool, tables = setting.random(pages, 2, 16, kv_heads, width), torch.arange(pages, device=setting.device)[None]
    zero, starts = torch.zeros(1, dtype=torch.int64), torch.tensor([0, tokens])
    zero, starts = zero.to(setting.device), starts.to(setting.device)
    dense = [t.transpose(0, 1)[None] for t in (q, k, v)]
    yield Measure(
        f"extend_attention prompt {tokens}",
        lambda: extend_attention(q, k, v, pool, tables, zero, starts, scale),
        flops=2.0 * tokens * tokens * heads * width,
        peers={"torch": lambda: fused_attention(dense, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)},
    )


def fused_attention(dense: list[torch.Tensor], **options: Any) -> torch.Tensor:
    q, k, v = dense
    return F.scaled_dot_product_attention(q, k, v, **options)


def product_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """Products of rows with the weight of a projection from the residual stream, compared with cuBLAS."""
    outputs, inputs = setting.pick(shape.heads * shape.head_dim, 48), setting.pick(shape.hidden, 64)
    weight = setting.random(outputs, inputs)
    linear = Linear(weight, compiled=False)
    for rows in (1, 64, 256, 4096) if setting.full else (2,):
        x = setting.random(rows, inputs)
        yield Measure(
            f"product {rows}",
            partial(linear, x),
            bytes=2.0 * (outputs * inputs + rows * (outputs + inputs)),
            flops=2.0 * rows * outputs * inputs,
            peers={"torch": partial(F.linear, x, weight)},
        )


def shares_of(
    route: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]], x: Tensor, router: Tensor, count: int
) -> Tensor:
    """The shares of the chosen experts; equal scores may be chosen in any order."""
    return route(x, router, count)[1]


def expert_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """Router and mixture of experts with one token, a decode batch and a prompt. Bytes: those of the chosen experts."""
    count, width, inner = shape.experts, setting.pick(shape.hidden, 64), setting.pick(shape.intermediate, 48)
    gate = setting.random(count, inner, width) if shape.gated else None
    act, products = ("silu", 3) if shape.gated else ("relu2", 2)
    experts = Experts(setting.random(count, inner, width), setting.random(count, width, inner), gate, act)
    router = setting.random(count, width, dtype=torch.float32)
    for tokens in (1, 64, 4096) if setting.full else (2,):
        x = setting.random(tokens, width)
        yield Measure(
            f"route_softmax {tokens}",
            partial(shares_of, route_softmax, x, router, shape.experts_per_token),
            bytes=4.0 * router.numel() + 2.0 * x.numel(),
            peers={"torch": partial(shares_of, reference.route_softmax, x, router, shape.experts_per_token)},
        )
        ids = torch.rand(tokens, count, device=setting.device).topk(shape.experts_per_token)[1]
        shares = torch.rand(tokens, shape.experts_per_token, device=setting.device)
        touched = count if ids.is_meta else int(ids.unique().numel())  # meta: benchmarks.gpu_sweep only compiles
        yield Measure(
            f"run_experts {tokens}",
            partial(run_experts, x, ids, shares, experts),
            bytes=2.0 * products * touched * inner * width,
            flops=2.0 * products * ids.numel() * inner * width,
        )


def tower_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """The operations of a vision tower, on images of 1,024 patches and ten prefix rows."""
    images, patches = setting.pick(8, 2), setting.pick(1024, 16)
    heads, hidden = shape.vit_heads, shape.vit_hidden
    width, length = hidden // heads, patches + 10
    q, k, v = setting.random(images * length, 3, heads, width).unbind(1)
    bounds = torch.arange(0, images * length + 1, length, dtype=torch.int32, device=setting.device)
    dense = [t.reshape(images, length, heads, width).transpose(1, 2) for t in (q, k, v)]
    yield Measure(
        "varlen_attention",
        lambda: varlen_attention(q, k, v, bounds, length, scale=width**-0.5),
        flops=4.0 * images * length**2 * hidden,
        peers={"torch": lambda: fused_attention(dense, scale=width**-0.5).transpose(1, 2)},
    )
    depth, total = 3 * shape.patch**2, images * patches
    given, places = setting.random(total, depth), setting.random(total, hidden)
    projection, table = Linear(setting.random(hidden, depth)), setting.random(11, hidden)
    source = torch.arange(11, 11 + total, device=setting.device)
    moved = 2.0 * (total * depth + hidden * depth + 2 * total * hidden)
    yield Measure(
        "patch_embed",
        lambda: patch_embed(given, projection, places, table, source),
        bytes=moved,
        flops=2.0 * total * depth * hidden,
    )
    rows, order = setting.random(total, hidden), torch.randperm(total, device=setting.device).view(-1, 4)
    weight = torch.ones(4 * hidden, device=setting.device)
    yield Measure("shuffle_norm", lambda: shuffle_norm(rows, order, weight, 1e-5), bytes=4.0 * total * hidden)


def outcome(measure: Measure, call: Callable[[], object], before: Sequence[Tensor]) -> Tensor:
    """What a call returns, as float32 numbers in one dimension; the tensors that it changes in place begin as
    `before`."""
    for tensor, value in zip(measure.changes, before, strict=True):
        tensor.copy_(value)
    result: Any = call()
    result = result[0] if isinstance(result, tuple) else result
    return result.float().reshape(-1)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference, relative to the RMS of `expected`."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def difference(measure: Measure, other: Callable[[], object]) -> float:
    """RMS of the difference of two results, relative to the RMS of Saccade's result. Tensors that a call changes in
    place are restored in between."""
    before = [tensor.clone() for tensor in measure.changes]
    ours, theirs = (outcome(measure, call, before) for call in (measure.call, other))
    return relative_difference(theirs, ours)


def result_of(setting: Setting, ceilings: dict[str, float], measure: Measure) -> dict[str, Any]:
    """Seconds, shares of the ceilings and, for each peer, Saccade's speedup and whether the results agree, or a message
    if the peer cannot run here."""
    seconds = timed(setting, measure.call)
    row: dict[str, Any] = {"seconds": seconds}
    if measure.bytes:
        row["share_of_copy"] = measure.bytes / seconds / 1e9 / ceilings["copy_gb_s"]
    if measure.flops:
        row["share_of_matmul"] = measure.flops / seconds / 1e12 / ceilings["bf16_tflop_s"]
    for name, other in measure.peers.items():
        try:
            differs = difference(measure, other)
            row[f"times_{name}"], row[f"difference_{name}"] = timed(setting, other) / seconds, differs
        except Exception as error:  # a peer's kernel may fail in any way; Saccade's is still measured
            row[f"failed_{name}"] = f"{type(error).__name__}: {error}"[:500]
    return row


def shapes(setting: Setting) -> Iterator[ModelShape]:
    for shape in (NANO_V2_12B_VL, NANO_3_OMNI, QWEN_35B_A3B):
        if setting.full:
            yield shape
            continue
        mixer: dict[str, Any] = {"mamba_heads": 8, "mamba_head_dim": 8, "state": 16}
        if shape.delta_value_heads:
            mixer = {"delta_key_heads": 2, "delta_value_heads": 4, "delta_head_dim": 8}
        yield replace(
            shape, hidden=64, heads=4, kv_heads=2, head_dim=16, vit_hidden=64, vit_heads=2, patch=4,
            experts=min(8, shape.experts), **mixer,
        )  # fmt: skip


def part_kernels(setting: Setting, ceilings: dict[str, float], record: Record) -> None:
    """Measures each operation of each model."""
    for shape in shapes(setting):
        sources = [kernel_measures(setting, shape)]
        if shape.experts:
            sources.append(tower_measures(setting, shape))
        for measure in (measure for source in sources for measure in source):
            record.take(shape.name, measure.name, partial(result_of, setting, ceilings, measure))
