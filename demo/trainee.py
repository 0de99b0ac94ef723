"""The demo model in training: its modules, the auxiliary head, the losses and the balance of its experts."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import transformers.models.nemotron_h.modeling_nemotron_h as nemotron_h
from torch import nn

from demo import world
from demo.architecture import new_model, patch_grid, pixel_values
from demo.conversations import IGNORE, Batch, centre
from demo.tokenizer import IMAGE_ID

FOCUS_HEADS = 2
"""Heads of the last attention layer that get the focus loss."""


class AuxiliaryHead(nn.Module):
    """Predicts, for each image token, the objects on its four patches, its place, and whether it contains the centre of
    an object (so that objects can be counted, whatever their size). Used only in training."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.colours, self.glyphs = len(world.COLOURS) + 1, len(world.GLYPHS) + 1
        self.patches = nn.Linear(hidden, 4 * (self.colours + self.glyphs))
        self.place = nn.Linear(hidden, len(world.PLACES))
        self.centre = nn.Linear(hidden, 1)

    def forward(self, features: torch.Tensor, pictures: Sequence[world.Picture], grid: tuple[int, int]) -> torch.Tensor:
        """Mean loss over `features` `[B, tokens, hidden]` of `pictures`, all of patch grid `grid`."""
        rows, columns = grid
        labels = torch.stack([_patch_labels(picture, grid) for picture in pictures])  # [B, rows, columns, 2]
        labels = labels.unflatten(2, (columns // 2, 2)).unflatten(1, (rows // 2, 2)).transpose(2, 3).reshape(-1, 2)
        logits = self.patches(features).float().reshape(len(labels), -1)
        colour = F.cross_entropy(logits[:, : self.colours], labels[:, 0], reduction="none")
        glyph = F.cross_entropy(logits[:, self.colours :], labels[:, 1], reduction="none", ignore_index=IGNORE)
        covered = labels[:, 1] > 0
        what = (colour + glyph)[covered].mean() + 0.5 * (colour + glyph)[~covered].mean()
        third = [torch.arange(side // 2) * 3 // (side // 2) for side in grid]
        places = (third[0][:, None] * 3 + third[1][None, :]).flatten().repeat(len(pictures))
        where = F.cross_entropy(self.place(features).float().flatten(0, 1), places)
        centres = torch.stack([_centre_labels(picture, grid) for picture in pictures]).flatten()
        centred = F.binary_cross_entropy_with_logits(self.centre(features).float().flatten(), centres, reduction="none")
        return what + 0.3 * where + 2 * centred[centres > 0].mean() + 2 * centred[centres == 0].mean()


def _patch_labels(picture: world.Picture, grid: tuple[int, int]) -> torch.Tensor:
    """`[rows, columns, 2]`: colour and glyph of the thing on each patch, counted from 1; 0 where there is none."""
    rows, columns = grid
    labels = torch.zeros(rows, columns, 2, dtype=torch.long)
    across, down = columns / picture.image.width, rows / picture.image.height
    for thing in picture.things:
        left, top, right, bottom = thing.box
        top, bottom = round(top * down), max(round(bottom * down), round(top * down) + 1)
        left, right = round(left * across), max(round(right * across), round(left * across) + 1)
        cells = labels[max(0, top) : bottom, max(0, left) : right]
        cells[..., 0] = list(world.COLOURS).index(thing.colour) + 1 if thing.colour else 0
        cells[..., 1] = world.GLYPHS.index(thing.glyph) + 1
    return labels


def _centre_labels(picture: world.Picture, grid: tuple[int, int]) -> torch.Tensor:
    """`[rows / 2, columns / 2]`: 1.0 for image tokens that contain the centre of a thing, 0.0 for the others."""
    labels = torch.zeros(grid[0] // 2, grid[1] // 2)
    for thing in picture.things:
        labels[centre(picture, thing, grid)] = 1.0
    return labels


class Trainee(nn.Module):
    """The model with its auxiliary head, and the two losses of a batch."""

    def __init__(self, seed: int, decoder_only: bool = False) -> None:
        """`decoder_only`: image features do not change, and there is no auxiliary loss."""
        super().__init__()
        self.model = new_model(seed)
        self.decoder_only = decoder_only
        if decoder_only:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.startswith("language_model."))
        text_config = self.model.config.get_text_config()
        self.auxiliary = AuxiliaryHead(text_config.hidden_size)
        layers = text_config.layers_block_type
        last_attention = max(index for index, kind in enumerate(layers) if kind == "full_attention")
        self.attention: torch.Tensor | None = None
        """`[B, heads, L, L]` of the last attention layer in the last forward pass, if it was kept."""
        self.model.language_model.model.layers[last_attention].mixer.register_forward_hook(self._keep_attention)

    def _keep_attention(self, _: nn.Module, __: object, output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        self.attention = output[1]

    def focus_loss(self, batch: Batch) -> torch.Tensor:
        """Loss of the first `FOCUS_HEADS` heads: the mean -log of their total attention to the tokens of `focus_on`.
        For counts, the mean -log of the number of these tokens times the geometric mean of the attention to each, which
        is largest if all get the same."""
        assert self.attention is not None, "only eager attention returns its weights"
        row, position = batch.focus_at.unbind(1)
        shares_FHL = self.attention[row, :FOCUS_HEADS, position].float()
        number = batch.focus_on.sum(-1)[:, None]
        together = (shares_FHL * batch.focus_on[:, None]).sum(-1).clamp(min=1e-5).log()
        each = (shares_FHL.clamp(min=1e-5).log() * batch.focus_on[:, None]).sum(-1) / number + number.log()
        return -torch.where(batch.focus_alike[:, None], each, together).mean()

    def image_features(self, pictures: Sequence[world.Picture]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each picture's `[tokens, hidden]` features, and the mean auxiliary loss."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, picture in enumerate(pictures):
            groups[patch_grid(picture.image.height, picture.image.width)].append(index)
        features: list[torch.Tensor] = [torch.empty(0)] * len(pictures)
        losses = []
        for grid, indices in groups.items():
            group = [pictures[index] for index in indices]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.decoder_only):
                tower = self.model.vision_model(pixel_values([picture.image for picture in group], grid))
                projected = self.model.project_vision_features(tower.features, *grid)
            losses.append(torch.zeros(()) if self.decoder_only else self.auxiliary(projected, group, grid))
            for index, rows in zip(indices, projected, strict=True):
                features[index] = rows
        return features, torch.stack(losses).mean()

    def embedded(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's tokens with the features of its pictures, `[B, L, d]`, and the mean auxiliary loss."""
        embedded = self.model.language_model.get_input_embeddings()(batch.ids)
        if not batch.pictures:
            return embedded, torch.zeros(())
        features, auxiliary = self.image_features(batch.pictures)
        mask = (batch.ids == IMAGE_ID)[..., None].expand_as(embedded)
        return embedded.masked_scatter(mask, torch.cat(features).to(embedded.dtype)), auxiliary

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits `[answer tokens, vocabulary]` fp32, their labels, auxiliary loss)."""
        decoder = self.model.language_model
        embedded, auxiliary = self.embedded(batch)
        hidden = decoder.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        labels = batch.labels[:, 1:]
        chosen = labels != IGNORE
        return decoder.lm_head(hidden[:, :-1][chosen]).float(), labels[chosen], auxiliary


class Balance:
    """Balances the use of experts without a loss: the routing bias of an expert rises while it is used too little."""

    RATE = 1e-3

    def __init__(self, model: nn.Module) -> None:
        self.load: dict[nn.Module, torch.Tensor] = {}
        for module in model.modules():
            if isinstance(module, nemotron_h.NemotronHTopkRouter):
                self.load[module] = torch.zeros(module.num_experts)
                module.register_forward_hook(self._count)

    def _count(self, router: nn.Module, _: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        if router.training:
            self.load[router] += torch.bincount(output[2].flatten(), minlength=len(self.load[router]))

    def step(self) -> None:
        for router, load in self.load.items():
            router.get_buffer("e_score_correction_bias").add_(self.RATE * (load.mean() - load).sign())
            load.zero_()
