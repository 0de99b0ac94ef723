"""The gated delta layer against transformers' in float32: whole rows, chunks, single tokens, and drafts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from decoder.batch import Batch, ScanRows, VerifyRows, VerifyTensors
from decoder.config import RING, DecoderOptions
from decoder.layers.gated_delta import GatedDeltaMixer
from decoder.layers.recurrent_descriptions import GatedDelta
from kernels.chunk_scan import plan_chunks

SHAPES = {
    "tiny": GatedDelta(24, 2, 4, 8, 6, chunk_size=8),
    "equal": GatedDelta(32, 2, 2, 16, 16, conv_kernel=3, chunk_size=16),
    "thrice": GatedDelta(20, 1, 3, 5, 7, conv_kernel=2, chunk_size=4),
}
SLOTS, DRAFTS = 8, 3


def oracle(spec: GatedDelta, seed: int = 0) -> Qwen3_5GatedDeltaNet:
    config = Qwen3_5TextConfig(
        hidden_size=spec.hidden_size, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_key_heads=spec.num_key_heads, linear_num_value_heads=spec.num_value_heads,
        linear_key_head_dim=spec.key_head_dim, linear_value_head_dim=spec.value_head_dim,
        linear_conv_kernel_dim=spec.conv_kernel, rms_norm_eps=spec.norm_eps,
    )  # fmt: skip
    torch.manual_seed(seed)
    layer = Qwen3_5GatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        for name, tensor in layer.named_parameters():
            if name == "A_log":
                tensor.uniform_(-2.0, 2.0)
            elif name == "norm.weight":
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(0.0, 1.0 if tensor.dim() == 2 else 0.5)
    return layer


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Layer:
    """The tested layer with its own pools, in which unwritten memory is NaN."""

    def __init__(self, shape: str, *, replayed: bool = True) -> None:
        self.spec = spec = SHAPES[shape]
        self.oracle, self.replayed = oracle(spec), replayed
        memory = spec.memory
        self.windows = torch.full((SLOTS, *memory.window), float("nan"))
        self.states = torch.full((SLOTS, *memory.state), float("nan"))
        ring = torch.full((2 if replayed else 0, RING, memory.inputs), float("nan"))
        self.mixer = GatedDeltaMixer(
            spec, DecoderOptions(), self.oracle.state_dict(), self.windows, self.states, ring
        )  # fmt: skip
        assert {n: tuple(w.shape) for n, w in self.oracle.state_dict().items()} == spec.weights()

    def expected(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.oracle(x[None])[0]

    def _batch(self, tokens: int, **fields: object) -> Batch:
        none = ints()
        known = {
            "ids_T": none, "splices": (), "updates": 0, "slots_U": none, "known_slots": None, "queries": 0,
            "lengths_Q": none, "longest": 0, "tables_QW": none, "places_T": none, "verify": None, "scan": None,
            "samples": None,
        }  # fmt: skip
        return Batch(**(known | fields))  # type: ignore[arg-type]

    def scan(self, x: Tensor, slot: int, computed: int, saves: list[tuple[int, int]] = ()) -> Tensor:  # type: ignore[assignment]
        """saves: (tokens of the row, slot)."""
        count = x.shape[0]
        chunks = plan_chunks([count], [computed], self.spec.chunk_size, [[computed + end for end, _ in saves]])
        ends = [chunk.last for chunk in chunks]
        rows = ScanRows(
            ints(slot), torch.tensor([computed > 0]), ints(0, count), ints(computed), ints(), chunks,
            tuple((ends.index(end), target) for end, target in saves), tuple((0, end, target) for end, target in saves),
        )  # fmt: skip
        return self.mixer(x, self._batch(count, scan=rows))

    def update(self, x: Tensor, slots: list[int]) -> Tensor:
        count = x.shape[0]
        return self.mixer(x, self._batch(count, updates=count, queries=count, slots_U=ints(*slots), known_slots=slots))

    def verify(self, x: Tensor, slots: list[int], accepted: int) -> Tensor:
        count = x.shape[0]
        rows = VerifyTensors(
            ints(1), ints(*slots)[None], ints(accepted), ints(count), torch.arange(count)[None], torch.arange(count),
            accepted + count if self.replayed else 0, None,
        )  # fmt: skip
        return self.mixer(x, self._batch(count, queries=count, verify=VerifyRows(None, self.replayed, lambda: rows)))

    def memory(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.windows[slot].clone(), self.states[slot].clone()


def inputs(layer: Layer, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, layer.spec.hidden_size, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 7, 16, 45])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_row(shape: str, tokens: int) -> None:
    layer = Layer(shape)
    x = inputs(layer, tokens)
    close(layer.scan(x, 3, 0), layer.expected(x))
    others = [slot for slot in range(SLOTS) if slot != 3]
    assert layer.states[others].isnan().all() and layer.windows[others].isnan().all()


@pytest.mark.parametrize("cut", [1, 2, 8, 13])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_then_single_tokens(shape: str, cut: int) -> None:
    """From any boundary, also after a first chunk of one token on a slot with an old state."""
    layer = Layer(shape)
    x = inputs(layer, 30)
    layer.scan(inputs(layer, 9, seed=1), 5, 0)
    found = [layer.scan(x[:cut], 5, 0), layer.scan(x[cut:24], 5, cut)]
    found += [layer.update(token, [5]) for token in x[24:].split(1)]
    close(torch.cat(found), layer.expected(x))
    layer.scan(x, 2, 0)
    for ours, theirs in zip(layer.memory(5), layer.memory(2), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_one_token_in_any_slots(shape: str) -> None:
    layer = Layer(shape)
    rows = [inputs(layer, 12, seed) for seed in range(4)]
    slots = [6, 1, 2, 4]
    for x, slot in zip(rows, slots, strict=True):
        layer.scan(x[:11], slot, 0)
    before = [layer.memory(slot) for slot in range(SLOTS)]
    padded = torch.stack([*(x[11] for x in rows[:2]), torch.ones_like(rows[0][0]), *(x[11] for x in rows[2:])])
    found = layer.update(padded, [6, 1, -1, 2, 4])
    close(found[[0, 1, 3, 4]], torch.stack([layer.expected(x)[11] for x in rows]))
    assert found[2].isfinite().all()
    for slot in (0, 3, 5, 7):
        for ours, theirs in zip(layer.memory(slot), before[slot], strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoints_are_states_to_go_on_from(shape: str) -> None:
    layer = Layer(shape)
    x = inputs(layer, 40)
    layer.scan(x[:9], 0, 0)
    layer.scan(x[9:], 0, 9, [(5, 1), (23, 2), (30, 3)])
    for computed, slot in ((14, 1), (32, 2), (39, 3)):
        close(layer.scan(x[computed:], slot, computed), layer.expected(x)[computed:])


@pytest.mark.parametrize("kept", range(DRAFTS + 1))
@pytest.mark.parametrize("replayed", [True, False], ids=["replay", "slots"])
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_that_are_rejected_leave_nothing(shape: str, replayed: bool, kept: int) -> None:
    """Three steps of a token and three drafts, of which the first `kept` are accepted each time."""
    layer = Layer(shape, replayed=replayed)
    x = inputs(layer, 30)
    expected = layer.expected(x)
    slots = [2] if replayed else [2, 5, 0, 7]
    layer.scan(x[:6], 2, 0)
    computed, accepted = 6, 0 if replayed else 1
    for step in range(3):
        stay = 1 + kept
        wrong = inputs(layer, 1 + DRAFTS - stay, seed=9 + step)
        drafted = torch.cat((x[computed : computed + stay], wrong))
        found = layer.verify(drafted, slots, accepted)
        close(found[:stay], expected[computed : computed + stay])
        computed += stay
        accepted = accepted + stay if replayed else stay
    if replayed:
        layer.mixer.advance(ints(1), ints(2), ints(6), ints(accepted - 1), accepted)
        close(layer.update(x[computed - 1 : computed], [6]), expected[computed - 1 : computed])
        layer.mixer.advance(ints(1), ints(2), ints(2), ints(accepted), accepted)
    current = 2 if replayed else slots[accepted - 1]
    close(layer.scan(x[computed:], current, computed), expected[computed:])


def test_a_description_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="num_value_heads 6 is not a multiple of num_key_heads 4"):
        GatedDelta(32, 4, 6)
    with pytest.raises(ValueError, match="chunk_size must be a power of two, not 48"):
        GatedDelta(32, chunk_size=48)
    with pytest.raises(ValueError, match="conv_kernel must be at least 2, not 1"):
        GatedDelta(32, conv_kernel=1)
