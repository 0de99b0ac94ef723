"""The weights of a layer's experts, stacked for grouped products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from kernels.activation_names import GROUPED
from kernels.activations import ACTIVATIONS
from kernels.linear.quantised import AnyWeight, Quantised, check_groups


class Experts(Sequence[Callable[[Tensor], Tensor]]):
    """Experts `down(act(up(x)))`, or gated ones, `down(act(gate(x)) * up(x))`, with stacked weights (`E` experts, `I`
    their width, `D` width of a token). Item e is expert e as a function `[rows, D]` -> `[rows, D]`."""

    def __init__(
        self, up_EID: AnyWeight, down_EDI: AnyWeight, gate_EID: AnyWeight | None = None, activation: str = "relu2"
    ) -> None:
        """Raises `ValueError` for shapes that do not fit, if only one of gate and up projection is quantised, for an
        activation that is not in `GROUPED`, or for weights on a GPU with groups that have no kernel."""
        count, self.inner, width = up_EID.shape
        if down_EDI.shape != (count, width, self.inner):
            fitting = (count, width, self.inner)
            raise ValueError(f"down projections of experts have shape {tuple(down_EDI.shape)}, but must have {fitting}")
        if gate_EID is not None and gate_EID.shape != up_EID.shape:
            raise ValueError(f"gates of {tuple(gate_EID.shape)} do not fit experts of {tuple(up_EID.shape)}")
        if activation not in GROUPED:
            raise ValueError(f"experts have one of {', '.join(GROUPED)} as their activation, not {activation}")
        if gate_EID is not None and isinstance(gate_EID, Quantised) != isinstance(up_EID, Quantised):
            plain, other = ("up", "gate") if isinstance(gate_EID, Quantised) else ("gate", "up")
            raise ValueError(f"experts whose {other} projection is quantised, but whose {plain} projection is not")
        for weight in (up_EID, down_EDI, gate_EID):
            if isinstance(weight, Quantised) and weight.values.device.type == "cuda":
                check_groups(weight)
        self.up_EID, self.down_EDI = up_EID.contiguous(), down_EDI.contiguous()
        self.gate_EID = None if gate_EID is None else gate_EID.contiguous()
        self.activation = activation

    @property
    def plain(self) -> bool:
        """Whether no weight is quantised."""
        return not isinstance(self.up_EID, Quantised) and not isinstance(self.down_EDI, Quantised)

    def __len__(self) -> int:
        return int(self.up_EID.shape[0])

    def __getitem__(self, expert: int) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        act, up, down = ACTIVATIONS[self.activation], _product(self.up_EID[expert]), _product(self.down_EDI[expert])
        if self.gate_EID is None:
            return lambda x: down(act(up(x)))
        gate = _product(self.gate_EID[expert])
        return lambda x: down(act(gate(x)) * up(x))


def _product(weight: AnyWeight) -> Callable[[Tensor], Tensor]:
    """The product with one expert's weight, which is expanded for each call if it is quantised."""
    return lambda x: F.linear(x, weight.dequantise(x.dtype) if isinstance(weight, Quantised) else weight)
