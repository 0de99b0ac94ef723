"""Trains the multi-token prediction head of the demo model to predict the next tokens of the trunk, which stays
unchanged.

    python -m demo.mtp --model demo/model --minutes 20     # resumes a checkpoint in --work
    python -m demo.mtp --model demo/model --export         # only writes the weights

The head has the structure of released ones (pattern `*E`): it combines the trunk's hidden state of a token with the
embedding of the token after it, and has one attention layer, one mixture of experts, and the trunk's vocabulary
projection. The same head predicts each further token, and is trained to do so for `DEPTH` of them. The loss is the
divergence from the trunk's own distribution, on the tokens of answers. The weights are written into the model's own
file, under `mtp.`; `transformers` ignores them.

A head belongs to one trunk. After further training of the trunk, continue from the old head with a new --work, and with
a checkpoint or a model that has a head as --start.
"""

import argparse
import hashlib
import json
import logging
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers.models.nemotron_h.modeling_nemotron_h as nemotron_h
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import NemotronH_Omni_Reasoning_V3, NemotronHConfig

from demo import data, fast
from demo.batches import Generator
from demo.conversations import IGNORE, Batch, Renderer
from demo.optimiser import ADAM_RATE, MUON_RATE, Muon
from demo.train import keep_freed_memory
from demo.trainee import Trainee

log = logging.getLogger("demo.mtp")

DEPTH = 3
DEPTH_WEIGHTS = (1.0, 0.5, 0.25)
PREFIX = "mtp."
EVALUATION_CAPTIONS = 60
WARMUP_STEPS = 50


def _norm(config: NemotronHConfig) -> nn.Module:
    return nemotron_h.NemotronHRMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class AttentionLayer(nn.Module):
    """The parts of the first layer: the combination of hidden state and embedding, and attention."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = _norm(config), _norm(config), _norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.mixer = nemotron_h.NemotronHAttention(config, layer_idx=0)


class ExpertsLayer(nn.Module):
    """The parts of the second layer: experts, and the last norm."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.norm, self.final_layernorm = _norm(config), _norm(config)
        self.mixer = nemotron_h.NemotronHMoE(config)


class Head(nn.Module):
    """One prediction step. Parameter names are those of released checkpoints, without `mtp.`."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        first, second = AttentionLayer(config), ExpertsLayer(config)
        self.layers = nn.ModuleList([first, second])
        self.heads, self.width = config.num_attention_heads, config.head_dim
        self.groups = self.heads // config.num_key_value_heads
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        with torch.no_grad():  # initially passes the trunk's hidden state of the token before on
            first.eh_proj.weight[:, config.hidden_size :].add_(torch.eye(config.hidden_size))

    def forward(self, embedded: list[Tensor], hidden: Tensor) -> list[Tensor]:
        """`embedded[j]`: `[B, L, d]`, the embedding of the token j after each position; `hidden`: the trunk's hidden
        states of the token before it. Returns the head's hidden states `[B, L, d]` for each of these tokens. Entries of
        later tokens are visible only at their own position; those of the first tokens at all later positions."""
        first, second = self.layers
        assert isinstance(first, AttentionLayer) and isinstance(second, ExpertsLayer)
        outs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth, token in enumerate(embedded):
            x = first.eh_proj(torch.cat((first.enorm(token), first.hnorm(hidden if depth == 0 else outs[-1])), -1))
            normed = first.norm(x)
            q, k, v = (self._split(of(normed)) for of in (first.mixer.q_proj, first.mixer.k_proj, first.mixer.v_proj))
            keys.append(k.repeat_interleave(self.groups, 1))
            values.append(v.repeat_interleave(self.groups, 1))
            x = x + first.mixer.o_proj(self._attend(q, keys, values))
            x = x + second.mixer(second.norm(x))
            outs.append(second.final_layernorm(x))
        return outs

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attends to all first entries up to the position, and to the position's own later ones. The first position has
        no token before it."""
        length, scale = q.shape[2], self.width**-0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[1:, 0] = False
        scores = [(q @ keys[0].mT * scale).float().masked_fill(~mask, -torch.inf)]
        scores += [((q * key).sum(-1, keepdim=True) * scale).float() for key in keys[1:]]
        shares = torch.cat(scores, -1).softmax(-1).to(q.dtype)
        out = shares[..., :length] @ values[0]
        for number, value in enumerate(values[1:]):
            out = out + shares[..., length + number, None] * value
        return out.transpose(1, 2).flatten(2)


class Trunk:
    """The trained model, frozen."""

    def __init__(self, path: Path) -> None:
        self.trainee = Trainee(0).requires_grad_(False).eval()
        weights = NemotronH_Omni_Reasoning_V3.from_pretrained(path, dtype=torch.float32).state_dict()
        self.trainee.model.load_state_dict(weights)
        self.decoder = self.trainee.model.language_model

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embedded tokens and hidden states after the last norm, `[B, L, d]` each."""
        embedded, _ = self.trainee.embedded(batch)
        return embedded, self.decoder.model(inputs_embeds=embedded, use_cache=False).last_hidden_state


def _ahead(x: Tensor, steps: int) -> Tensor:
    """`[B, L, d]` or `[B, L]` shifted so that position t has the value of t + steps. The end is filled with zeros
    (`[B, L, d]`) or `IGNORE` (`[B, L]`)."""
    return F.pad(x, (0, 0, 0, steps))[:, steps:] if x.ndim == 3 else F.pad(x, (0, steps), value=IGNORE)[:, steps:]


def predictions(trunk: Trunk, head: Head, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """For each depth: logits `[n, vocabulary]` of head and trunk, at all but the first token of the answers."""
    embedded, hidden = trunk.read(batch)
    before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    outs = head([_ahead(embedded, depth) for depth in range(DEPTH)], before)
    project, answers = trunk.decoder.lm_head, batch.labels != IGNORE
    found = []
    for depth, out in enumerate(outs):
        drawn = answers & (_ahead(batch.labels, depth + 1) != IGNORE)
        found.append((project(out[drawn]).float(), project(_ahead(hidden, depth)[drawn]).float()))
    return found


class Run:
    """A training run, which can be resumed from its checkpoint."""

    def __init__(self, work: Path, model: Path, start: Path | None, seed: int, rate: float = 1.0) -> None:
        self.path = work / "mtp.pt"
        self.rate = rate
        self.trunk = Trunk(model)
        self.digest = trunk_digest(model)
        config = self.trunk.trainee.model.config.get_text_config()
        assert isinstance(config, NemotronHConfig)
        self.head = Head(config)
        matrices = [p for n, p in self.head.named_parameters() if p.ndim > 1 and "gate" not in n]
        others = [p for n, p in self.head.named_parameters() if p.ndim < 2 or "gate" in n]
        self.optimisers = [Muon(matrices, MUON_RATE), torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.97))]
        self.steps, self.seconds = 0, 0.0
        if self.path.exists():
            self._restore(model)
        elif start is not None:
            self.head.load_state_dict(start_weights(start))
        self.renderer = Renderer(Tokenizer.from_file(str(model / "tokenizer.json")))
        self.generator = Generator(self.renderer, seed + self.steps)

    def _restore(self, model: Path) -> None:
        state = torch.load(self.path, weights_only=True)
        if state["trunk"] != self.digest:
            raise SystemExit(
                f"{self.path} belongs to another trunk than {model}: use another --work, and --start {self.path}"
            )
        self.head.load_state_dict(state["head"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.steps, self.seconds = state["steps"], state["seconds"]
        log.info("resumed at step %d after %.1f minutes", self.steps, self.seconds / 60)

    def save(self) -> None:
        """Replaces the checkpoint, atomically."""
        state = {
            "trunk": self.digest,
            "head": self.head.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "steps": self.steps,
            "seconds": self.seconds,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def step(self, progress: float) -> float:
        """One optimiser step at `progress` (0..1) of the training; the loss of the first depth."""
        factor = max(0.0, min((self.steps + 1) / WARMUP_STEPS, (1 - progress) / 0.6, 1.0))
        for optimiser, rate in zip(self.optimisers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = self.rate * rate * factor
        self.generator.progress = progress
        first = []
        batches = list(self.generator.step())
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                found = predictions(self.trunk, self.head, batch)
            losses = [
                F.kl_div(mine.log_softmax(-1), true.log_softmax(-1), reduction="batchmean", log_target=True)
                for mine, true in found
                if len(mine)
            ]
            if losses:
                total = sum(loss * weight for loss, weight in zip(losses, DEPTH_WEIGHTS, strict=False))
                (total / len(batches)).backward()  # type: ignore[union-attr]
                first.append(losses[0].item())
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.steps += 1
        return sum(first) / max(1, len(first))

    @torch.no_grad()
    def evaluate(self, captions: int = EVALUATION_CAPTIONS) -> list[float]:
        """For each depth, the share of held-out captions' tokens for which head and trunk agree on the likeliest."""
        hits, counts = [0] * DEPTH, [0] * DEPTH
        for start in range(0, captions, 10):
            examples = [data.question_example(seed, "caption") for seed in range(start, min(start + 10, captions))]
            batch = self.renderer.collate([self.renderer.render(example) for example in examples])
            for depth, (mine, true) in enumerate(predictions(self.trunk, self.head, batch)):
                hits[depth] += int((mine.argmax(-1) == true.argmax(-1)).sum())
                counts[depth] += len(mine)
        return [hit / max(1, count) for hit, count in zip(hits, counts, strict=True)]


def trunk_digest(model: Path) -> str:
    """Digest of all weights except the head's."""
    weights = load_file(model / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(name for name in weights if not name.startswith(PREFIX)):
        digest.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def start_weights(start: Path) -> dict[str, Tensor]:
    """The head of a checkpoint, or of an exported model, as `Head` names its weights."""
    if start.is_file():
        state: dict[str, Tensor] = torch.load(start, weights_only=True)["head"]
        return state
    weights = load_file(start / "model.safetensors")
    found = {name.removeprefix(PREFIX): tensor.float() for name, tensor in weights.items() if name.startswith(PREFIX)}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name in [name for name in found if ".experts." in name and "shared" not in name]:
        stem, number, part, _ = name.rsplit(".", 3)
        experts[f"{stem}.{part}"][int(number)] = found.pop(name)
    return found | {name: torch.stack([of[n] for n in range(len(of))]) for name, of in experts.items()}


def export(head: Head, model: Path) -> None:
    """Writes the head in bf16 into the model's weights, replacing an existing one."""
    weights = {
        name: tensor for name, tensor in load_file(model / "model.safetensors").items() if not name.startswith(PREFIX)
    }
    for name, tensor in head.state_dict().items():
        if name.endswith(("experts.up_proj", "experts.down_proj")):
            stem, _, part = name.rpartition(".")
            for expert, matrix in enumerate(tensor):
                weights[f"{PREFIX}{stem}.{expert}.{part}.weight"] = matrix.to(torch.bfloat16).contiguous()
        else:
            exact = name.endswith("e_score_correction_bias")
            weights[PREFIX + name] = tensor.to(torch.float32 if exact else torch.bfloat16).contiguous()
    temporary = model / "model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(model / "model.safetensors")


def train(run: Run, minutes: float, report_minutes: float) -> None:
    """Trains until `minutes` of processor time over threads are spent."""
    fast.install()
    losses: list[float] = []
    next_report = run.seconds + 60 * report_minutes
    while run.seconds < 60 * minutes:
        started = time.process_time()
        losses.append(run.step(run.seconds / (60 * minutes)))
        run.seconds += (time.process_time() - started) / torch.get_num_threads()
        if run.seconds >= next_report:
            run.save()
            shares = [round(share, 3) for share in run.evaluate()]
            log.info(
                "step %d  %.1f min  loss %.4f  agreement on captions %s",
                run.steps, run.seconds / 60, sum(losses) / len(losses), json.dumps(shares),
            )  # fmt: skip
            losses.clear()
            next_report += 60 * report_minutes
    run.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo/model"), help="model that gets the head's weights")
    parser.add_argument("--work", type=Path, default=Path("~/.cache/saccade/demo-mtp"), help="folder of the checkpoint")
    parser.add_argument("--start", type=Path, help="checkpoint or model with the first head if --work has none")
    parser.add_argument("--minutes", type=float, default=20, help="total training time, including resumed runs")
    parser.add_argument("--report-minutes", type=float, default=2, help="minutes between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--export", action="store_true", help="only write the weights from the newest checkpoint")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    work = arguments.work.expanduser()
    work.mkdir(parents=True, exist_ok=True)
    run = Run(work, arguments.model, arguments.start, arguments.seed, arguments.rate)
    if not arguments.export:
        train(run, arguments.minutes, arguments.report_minutes)
    log.info("agreement on captions %s", [round(share, 3) for share in run.evaluate(200)])
    export(run.head, arguments.model)
    log.info("wrote %s", arguments.model)


if __name__ == "__main__":
    main()
