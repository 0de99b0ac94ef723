"""The short convolution against transformers' in float32, and models of short convolutions with other layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speculation import Answers, answers, pairwise
from tiny_decoder import both_norms, delta_config, make_runner
from torch import Tensor
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from decoder.arena import ArenaLayout
from decoder.batch import Batch, ScanRows, VerifyRows, VerifyTensors
from decoder.config import RING, DecoderConfig, DecoderOptions
from decoder.layers.recurrent_descriptions import ShortConv
from decoder.layers.short_conv import ShortConvMixer
from decoder.layers.spec import Layer
from kernels.rope import Rope

SPECS = {f"{taps}{'b' * bias}": ShortConv(12, taps, bias) for taps, bias in ((2, False), (3, True), (7, False))}
SLOTS, DRAFTS = 8, 3


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class OneLayer:
    """The tested layer with its own windows, in which unwritten memory is NaN."""

    def __init__(self, name: str, *, replayed: bool = True) -> None:
        spec = SPECS[name]
        config = Lfm2Config(
            hidden_size=spec.hidden_size, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=spec.conv_kernel,
            conv_bias=spec.conv_bias,
        )  # fmt: skip
        torch.manual_seed(0)
        self.oracle, self.replayed = Lfm2ShortConv(config, 0).eval(), replayed
        with torch.no_grad():
            for tensor in self.oracle.parameters():
                tensor.normal_(0.0, 0.7)
        weights = {n.replace("conv.", "conv1d.", 1): w for n, w in self.oracle.state_dict().items()}
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == spec.weights()
        self.windows = torch.full((SLOTS, *spec.memory.window), float("nan"))
        ring = torch.full((2 if replayed else 0, RING, spec.memory.inputs), float("nan"))
        states = torch.empty(SLOTS, *spec.memory.state)
        self.mixer = ShortConvMixer(spec, DecoderOptions(), weights, self.windows, states, ring)

    def inputs(self, tokens: int, seed: int = 0) -> Tensor:
        return torch.randn(tokens, self.mixer.spec.hidden_size, generator=torch.Generator().manual_seed(seed))

    def expected(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.oracle(x[None])[0]

    def _run(self, x: Tensor, **fields: Any) -> Tensor:
        none = ints()
        known: dict[str, Any] = {
            "ids_T": none, "splices": (), "updates": 0, "slots_U": none, "known_slots": None, "queries": 0,
            "lengths_Q": none, "longest": 0, "tables_QW": none, "places_T": none, "verify": None, "scan": None,
            "samples": None,
        }  # fmt: skip
        return self.mixer(x, Batch(**(known | fields)))

    def scan(self, x: Tensor, slot: int, computed: int, *saves: tuple[int, int]) -> Tensor:
        """saves: (tokens of the row, slot)."""
        kept = tuple((0, end, target) for end, target in saves)
        count = x.shape[0]
        initial = torch.tensor([computed > 0])
        rows = ScanRows(ints(slot), initial, ints(0, count), ints(computed), ints(), (), (), kept)
        return self._run(x, scan=rows)

    def update(self, x: Tensor, *slots: int) -> Tensor:
        count = len(slots)
        return self._run(x, updates=count, queries=count, slots_U=ints(*slots), known_slots=list(slots))

    def verify(self, x: Tensor, slots: list[int], accepted: int) -> Tensor:
        count = x.shape[0]
        rows = VerifyTensors(
            ints(1), ints(*slots)[None], ints(accepted), ints(count), torch.arange(count)[None], torch.arange(count),
            accepted + count if self.replayed else 0, None,
        )  # fmt: skip
        return self._run(x, queries=count, verify=VerifyRows(None, self.replayed, lambda: rows))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("name", SPECS)
def test_chunks_checkpoints_and_single_tokens(name: str) -> None:
    """From any boundary, also after a chunk of one token on a slot with an old window."""
    layer = OneLayer(name)
    x = layer.inputs(30)
    layer.scan(layer.inputs(9, seed=1), 5, 0)
    found = [layer.scan(x[:1], 5, 0), layer.scan(x[1:24], 5, 1, (1, 0), (9, 1))]
    found += [layer.update(token, 5) for token in x[24:].split(1)]
    expected = layer.expected(x)
    close(torch.cat(found), expected)
    for computed, slot in ((2, 0), (10, 1)):
        close(layer.scan(x[computed:], slot, computed), expected[computed:])
    assert layer.windows[[2, 3, 4, 6, 7]].isnan().all()


def test_rows_of_one_token_in_any_slots() -> None:
    layer = OneLayer("3b")
    rows, slots = [layer.inputs(12, seed) for seed in range(3)], [6, 1, 2]
    for x, slot in zip(rows, slots, strict=True):
        layer.scan(x[:11], slot, 0)
    given = torch.stack([rows[0][11], rows[1][11], torch.ones(12), rows[2][11]])
    found = layer.update(given, 6, 1, -1, 2)
    close(found[[0, 1, 3]], torch.stack([layer.expected(x)[11] for x in rows]))
    assert found[2].isfinite().all() and layer.windows[[0, 3, 4, 5, 7]].isnan().all()


@pytest.mark.parametrize("kept", range(DRAFTS + 1))
@pytest.mark.parametrize("replayed", [True, False], ids=["replay", "slots"])
@pytest.mark.parametrize("name", SPECS)
def test_drafts_that_are_rejected_leave_nothing(name: str, replayed: bool, kept: int) -> None:
    """Three steps of a token and three drafts, of which the first `kept` are accepted each time."""
    layer = OneLayer(name, replayed=replayed)
    x, stay = layer.inputs(24), 1 + kept
    expected = layer.expected(x)
    slots = [2] if replayed else [2, 5, 0, 7]
    layer.scan(x[:1], 2, 0)
    computed, accepted = 1, 0 if replayed else 1
    for step in range(3):
        wrong = layer.inputs(1 + DRAFTS - stay, seed=9 + step)
        found = layer.verify(torch.cat((x[computed : computed + stay], wrong)), slots, accepted)
        close(found[:stay], expected[computed : computed + stay])
        computed += stay
        accepted = accepted + stay if replayed else stay
    if replayed:
        layer.mixer.advance(ints(1), ints(2), ints(6), ints(accepted - 1), accepted)
        close(layer.update(x[computed - 1 : computed], 6), expected[computed - 1 : computed])
        layer.mixer.advance(ints(1), ints(2), ints(2), ints(accepted), accepted)
    current = 2 if replayed else slots[accepted - 1]
    close(layer.scan(x[computed:], current, computed), expected[computed:])


def test_descriptions_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="conv_kernel must be at least 2, not 1"):
        ShortConv(32, 1)
    with pytest.raises(ValueError, match="norm_before and norm_after are both false"):
        Layer((("mixer", ShortConv(32)),), norm_before=False)
    for frequencies in (0, 5):
        with pytest.raises(ValueError, match=f"{frequencies} frequencies that are not 0 are given; 1 to 4 are"):
            Rope(8, frequencies=frequencies)


# -- whole models ------------------------------------------------------------------------------------------------------

SMALL = {"seed": 1, "output": 12}
NORMED = "S*S-"
"""With norms before and after all mixers."""
PATTERNS = ("SS", NORMED, "MSG*S")
CASES = pairwise(
    {
        "state_cache": ("none", "align", "all", "auto"),
        "speculative": ("none", "ngram"),
        "spec_state": ("replay", "slots"),
        "max_chunk": (1, 7, None),
        "preempted": (False, True),
        "graphs": ("off", "on"),
        "native": ("auto", "off"),
        "pattern": PATTERNS,
    }
)


def config_of(pattern: str) -> DecoderConfig:
    config = delta_config(pattern)
    return both_norms(config) if pattern == NORMED else config


@pytest.fixture(scope="module")
def plain() -> dict[str, Answers]:
    """Operation by operation, uncached, without drafts."""
    return {name: answers(config=config_of(name), **SMALL, state_cache="none", native="off") for name in PATTERNS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[name]) for name in sorted(case)))
def test_any_options_equal_plain(case: dict[str, Any], plain: dict[str, Answers]) -> None:
    chosen = dict(case)
    pattern = chosen.pop("pattern")
    expected = plain[pattern]
    found = answers(config=config_of(pattern), **SMALL, known=expected.drawn, **chosen)
    assert found.drawn == expected.drawn
    for name, logprobs in expected.logprobs.items():
        assert found.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
    if case["speculative"] == "ngram":
        assert found.stats["accepted_1"] > 10


def test_a_window_is_all_that_a_slot_holds() -> None:
    """The state takes no memory, and checkpoints lie at page boundaries: nothing scans in chunks."""
    config = config_of("SS*")
    options = DecoderOptions(max_seqs=2, max_len=64, page_size=4, native="off")
    layout = ArenaLayout.of(config, options)
    assert layout.state_bytes == (0, 0) and layout.window_bytes == (256, 256)
    assert config.scan_chunk is None and not config.has_recurrent_states
    runner = make_runner(config, page_size=4)
    assert runner.cache is not None
    assert (runner.cache.placement.block, runner.cache.placement.chunk) == (4, 4)
    assert delta_config("S*G").has_recurrent_states
