"""The optimisers of the demo model: Muon for matrices, Adam for everything else."""

import torch
from torch import nn

from demo.trainee import Trainee

MUON_RATE, ADAM_RATE = 0.008, 1e-3


def orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """Approximates the nearest semi-orthogonal matrices to `[..., m, n]` by five quintic Newton-Schulz steps in bf16
    (Muon)."""
    x = update.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix-shaped updates are orthogonalised. Parameters are `[..., m, n]`."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.03) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def optimisers(trainee: Trainee) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices; Adam for embeddings, head, router, patch projection, norms and vectors."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    by_adam = ("embedding", "lm_head", "patch_projection", "gate", "conv1d", "auxiliary", "cls_register_token")
    for name, parameter in trainee.named_parameters():
        if not parameter.requires_grad or "video_patch_projection" in name:
            continue
        (others if parameter.ndim < 2 or any(part in name for part in by_adam) else matrices).append(parameter)
    return [Muon(matrices, MUON_RATE), torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.97), weight_decay=0.0)]
