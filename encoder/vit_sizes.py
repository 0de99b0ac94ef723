"""Sizes that follow from the settings of a vision transformer of any family. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from encoder.media_limits import RGB
from kernels.activation_names import COMPILED

if TYPE_CHECKING:
    import torch

    from encoder.vit import ViTSizes


def check_activation(name: str) -> None:
    """Raises `ValueError` unless `name` is an activation that `kernels.activation_names` lists."""
    if name not in COMPILED:
        raise ValueError(f"vision hidden_act {name!r} is none of {', '.join(COMPILED)}")


class DerivedSizes:
    """A base for `TowerSizes` of transformers that add positions to embedded patches and merge squares of patches into
    image tokens; subclasses are dataclasses with the fields below."""

    if TYPE_CHECKING:

        @property
        def hidden_size(self) -> int:
            """Width of the tower, in features."""

        @property
        def intermediate_size(self) -> int:
            """Inner width of the MLP."""

        @property
        def text_hidden_size(self) -> int:
            """Width of the rows that the decoder gets."""

        @property
        def patch_size(self) -> int:
            """Side of a patch, in pixels."""

        @property
        def merge_size(self) -> int:
            """Patches per image token along each side."""

    def not_compiled(self, dtype: torch.dtype, device: torch.device) -> str:
        """Why the tower has no compiled code for this dtype and device; empty if it has."""
        from encoder.native import not_compiled

        return not_compiled(cast("ViTSizes", self), dtype, device)  # the sizes of all towers that are compiled

    def check_positive(self, *names: str) -> None:
        """Raises `ValueError` naming the first of these fields that is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"vision {name} must be at least 1, got {getattr(self, name)}")

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def factor(self) -> int:
        """Side, in pixels, of the area of one image token."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch of an image."""
        return RGB * self.patch_size**2

    @property
    def position_width(self) -> int:
        """The width of the tower, since positions are added to embedded patches."""
        return self.hidden_size

    @property
    def row_width(self) -> int:
        """The decoder's hidden size, which the last projection projects to."""
        return self.text_hidden_size

    @property
    def activation_width(self) -> int:
        """An estimate: the larger of (residual, fused q, k, v, attention output) and (residual, norm, MLP before and
        after its activation)."""
        return max(5 * self.hidden_size, 2 * self.hidden_size + 2 * self.intermediate_size)
