"""For decoder tests: random tiny models of transformers, their weights, and our runners on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.descriptions import Attention
from decoder.layers.recurrent_descriptions import GatedDelta, Mamba2, ShortConv
from decoder.layers.spec import Layer
from decoder.request import DecoderRequest, EmbeddingSource, TokenEvent
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from decoder.sequence import Sequence as Running
from decoder.step import Step
from families.nemotron_h.config import NemotronHConfig as Published
from kernels.native.structs import Form
from kernels.rope import Rope

if TYPE_CHECKING:  # its import takes longer than torch's, and most programs that use tiny models do without
    from transformers import NemotronHForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}


_PUBLISHED: dict[DecoderConfig, Published] = {}


def tiny_config(pattern: str = "M-*EM", **changes: Any) -> DecoderConfig:
    """A decoder of a few thousand parameters."""
    published = Published(pattern=pattern, **(TINY | changes))
    _PUBLISHED[published.decoder] = published
    return published.decoder


TINY_DELTA: dict[str, Any] = {
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_head_dim": 16,
    "value_head_dim": 16,
    "chunk_size": 8,
}


def delta_config(pattern: str = "G-*G-", delta: dict[str, Any] | None = None, **changes: Any) -> DecoderConfig:
    """The same with layers of the gated delta rule (G in the pattern), whose shape `delta` changes, and with short
    convolutions (S)."""
    plain = tiny_config(pattern.replace("G", "M").replace("S", "M"), **changes)
    hidden = plain.hidden_size
    mixers = {"G": GatedDelta(hidden, **(TINY_DELTA | (delta or {}))), "S": ShortConv(hidden, conv_bias=True)}
    layers = [
        Layer((("mixer", mixers[letter]),)) if letter in mixers else layer
        for letter, layer in zip(pattern, plain.layers, strict=True)
    ]
    return replace(plain, layers=tuple(layers))


def both_norms(config: DecoderConfig) -> DecoderConfig:
    """The same with norms before and after all mixers, each in a layer of its own, and short convolutions of seven
    taps, as in LFM3."""
    mixers = [replace(mixer, conv_kernel=7) if isinstance(mixer, ShortConv) else mixer for mixer in config.mixers]
    return replace(config, layers=tuple(Layer((("mixer", mixer),), norm_after=True) for mixer in mixers))


def parallel_config(pattern: str = "P-P", mamba: dict[str, Any] | None = None, **changes: Any) -> DecoderConfig:
    """The same with Mamba-2 and attention in one layer (P in the pattern), each with a factor. Attention has positions,
    norms of queries and keys, and a gate; `mamba` changes Mamba-2's description."""
    plain = tiny_config(pattern.replace("P", "M"), **changes)
    width, layers = plain.hidden_size, []
    attention = Attention(width, 4, 2, 8, rope=Rope(8), gate=True, qk_norm=1e-6)
    for letter, layer in zip(pattern, plain.layers, strict=True):
        [(name, mixer)] = layer.mixers
        if letter == "P":
            assert isinstance(mixer, Mamba2)
            mixers = (name, replace(mixer, **(mamba or {}))), ("beside", attention)
            layer = Layer(mixers, 0.9, (0.7, 1.3))
        layers.append(layer)
    return replace(plain, layers=tuple(layers), position_axes=1)


def oracle(decoder: DecoderConfig, seed: int = 0) -> NemotronHForCausalLM:
    """transformers' model of the shape of a `tiny_config`, with random weights that make every term matter."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = _PUBLISHED[decoder]
    names = NemotronHConfig.__dataclass_fields__
    fields = {name: getattr(config, name) for name in vars(config) if name in names}
    fields["layers_block_type"] = NemotronHConfig._pattern_to_list(config.pattern)
    fields.pop("time_step_limit")
    torch.manual_seed(seed)
    model = NemotronHForCausalLM(NemotronHConfig(time_step_min=1e-9, **fields)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("dt_bias", "e_score_correction_bias", ".bias")):
                tensor.normal_(0.0, 0.3)
            elif name.endswith(("norm.weight", "norm_f.weight", ".D")):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):
                tensor.uniform_(-1.0, 1.0)
            else:
                tensor.normal_(0.0, 0.6 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 and "conv1d" not in name else 0.3)
        model.model.embeddings.weight.normal_(0.0, 1.0)
        if config.tie_word_embeddings:
            model.lm_head.weight.copy_(model.model.embeddings.weight)
    return model


def weights_of(model: NemotronHForCausalLM, config: DecoderConfig) -> dict[str, Tensor]:
    """Weights by native names, as the checkpoint reader returns them."""
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return dict(state)


def random_weights(
    config: DecoderConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Random weights without transformers, scaled so that activations stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in config.expected_weights().items():
        if name.endswith(("norm.weight", "norm_f.weight", ".D")):
            tensor = torch.rand(shape, generator=generator) + 0.5
        elif name.endswith("A_log"):
            tensor = torch.rand(shape, generator=generator) * 2.0 - 1.0
        else:
            fan = shape[-1] if len(shape) > 1 else 10
            tensor = torch.randn(shape, generator=generator) / fan**0.5
        if name == "model.embeddings.weight":
            tensor = torch.randn(shape, generator=generator)
        yield name, tensor.to(dtype)


def make_runner(config: DecoderConfig, weights: Any = None, **options: Any) -> DecoderRunner:
    """A runner with small defaults; `weights` defaults to `random_weights(config)`."""
    chosen = DecoderOptions(**({"max_seqs": 8, "max_len": 256, "max_batched_tokens": 512} | options))
    if weights is None:
        weights = random_weights(config)
    return DecoderRunner(config, chosen, weights.items() if isinstance(weights, dict) else weights)


def greedy_params(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def request(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    spans: Sequence[EmbeddingSource] = (),
    **rest: Any,
) -> DecoderRequest:
    return DecoderRequest(name, list(prompt), params or greedy_params(), tuple(spans), **rest)


class FakeSource:
    """Image rows that become ready, fail, or are released when the test says so."""

    complete = True

    def __init__(self, start: int, length: int, key: bytes, rows: Tensor | None = None, *, ready: bool = True) -> None:
        self.start, self.length, self.end, self.key = start, length, start + length, key
        self._rows, self.ready = rows, ready
        self.error: Exception | None = None
        self.releases = 0

    def rows(self) -> Tensor:
        assert self.ready and self.releases == 0, "rows are read before they are ready, or after they were released"
        assert self._rows is not None
        return self._rows

    def release(self) -> None:
        self.releases += 1

    def again(self) -> FakeSource:
        """A new source of the same rows, which are ready."""
        return FakeSource(self.start, self.length, self.key, self._rows)


def image(start: int, rows: Tensor, *, ready: bool = True) -> FakeSource:
    """A source of `rows` with a content key of its own."""
    return FakeSource(start, rows.shape[0], rows.numpy().tobytes()[:32], rows, ready=ready)


def run(
    runner: DecoderRunner, *requests: DecoderRequest, limit: int = 2000, preempt_every: int = 0
) -> dict[str, list[TokenEvent]]:
    """Adds the requests and steps until all have ended; returns events by request. Fails if nothing advances.

    `preempt_every`: after this many steps, one of the running requests, each in turn, is preempted.
    """
    for item in requests:
        runner.add(item)
    events: dict[str, list[TokenEvent]] = {}
    for number in range(1, limit + 1):
        if preempt_every and number % preempt_every == 0 and runner.scheduler.running:
            running = sorted(runner.scheduler.running, key=lambda sequence: sequence.arrival)
            preempt(runner, running[number // preempt_every % len(running)].request_id)
        if not runner.has_work:
            runner.check_integrity()
            return events
        for event in runner.step():
            events.setdefault(event.request_id, []).append(event)
    raise AssertionError(f"requests have not ended after {limit} steps: {runner.stats()}")


def spoil(runner: DecoderRunner) -> None:
    """Fills the memory of states and pages, and the buffers of graphs, with NaN and invalid numbers: a step must read
    nothing that has not been written."""
    runner.arena.buffer.fill_(255)
    if (graphs := runner.forward.graphs) is not None:
        for tensors in (*(buffers.tensors for buffers in graphs.buffers.values()), graphs.hidden):
            for tensor in tensors.values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def preempt(runner: DecoderRunner, request_id: str) -> None:
    """Preempts a running request in the next step; it continues later with the same result."""
    scheduler = runner.scheduler
    schedule = scheduler.schedule
    sequence = next(sequence for sequence in scheduler.running if sequence.request_id == request_id)

    def once(preempt: Iterable[Running] = ()) -> Step:
        scheduler.schedule = schedule  # The events without the time at which the request was first scheduled.
        return schedule([*preempt, sequence])

    scheduler.schedule = once  # type: ignore[method-assign]


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def timeless(events: Sequence[TokenEvent]) -> list[TokenEvent]:
    """The events without the time at which the request was first scheduled."""
    return [event._replace(scheduled=None) for event in events]


def state_content(runner: DecoderRunner, slot: int) -> torch.Tensor:
    """States and windows of all layers in a slot, in the form of torch operations, whatever form they have there."""
    arena, native = runner.arena, runner.model.native
    before = arena.save(slot, [])
    if native is not None:
        native.convert_states(Form.PLAIN, torch.tensor([slot]))
    content = torch.cat([of[slot].flatten() for of in (*arena.states, *arena.windows)])
    arena.load(slot, [], before)
    return content
