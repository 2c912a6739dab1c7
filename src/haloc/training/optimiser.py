"""SGD with Nesterov momentum, or AdamW; weight decay on weights alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from haloc.errors import ModelError
from haloc.training.settings import TrainSettings

#: How slowly AdamW forgets the squares of gradients.
_SQUARES = 0.999


def optimiser_of(model: nn.Module, settings: TrainSettings, skip: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
    """Returns the optimiser of all parameters that want a gradient, except those to ``skip``.

    Tensors of one axis (biases, scales and shifts of normalisations) are not decayed: they are few, and pulling them
    to zero switches channels off rather than smoothing the function.
    """
    skipped = {id(parameter) for parameter in skip}
    trained = [
        parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in skipped
    ]
    if not trained:
        raise ModelError("no parameter of the model wants a gradient; call requires_grad_() on those to be trained")
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    device = trained[0].device
    # On the device, so that a captured step can be given another one.
    lr = torch.tensor(settings.lr, device=device)
    wanted = [group for group in groups if group["params"]]
    fused = device.type in ("cpu", "cuda") and all(map(_is_dense, trained))
    if settings.optimiser == "adamw":
        how: dict[str, Any] = {"fused": fused, "foreach": None if fused else False, "capturable": device.type == "cuda"}
        return torch.optim.AdamW(wanted, lr=lr, betas=(settings.momentum, _SQUARES), **how)
    return torch.optim.SGD(wanted, lr=lr, momentum=settings.momentum, nesterov=settings.momentum > 0, fused=fused)


def start_at_rest(optimiser: torch.optim.Optimizer) -> None:
    """Makes momentum and the like now, as zeros, which is what the first step would take them for.

    A checkpoint then finds it there, and a captured step does not make it anew at every replay.
    """
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if isinstance(optimiser, torch.optim.AdamW):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                place = parameter.device if group["fused"] or group["capturable"] else "cpu"
                optimiser.state[parameter] = {"step": torch.zeros((), device=place), **moments}
            elif group.get("momentum"):
                optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _is_dense(parameter: nn.Parameter) -> bool:
    """Whether it has its memory to itself; the fused kernel of a part of a larger tensor would write beside it."""
    return parameter.stride() == torch.empty_like(parameter, device="meta").stride()
