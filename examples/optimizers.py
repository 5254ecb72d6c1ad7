"""Optimizers by name, and fp32 master weights written out in plain PyTorch, to compare swapper with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

__all__ = ["NAMES", "MasterWeights", "make_optimizers"]

_BY_NAME: dict[str, tuple[float, Callable[[list[Tensor], float], Optimizer]]] = {
    "adamw": (2e-3, lambda parameters, lr: AdamW(parameters, lr=lr)),
    "adam": (2e-3, lambda parameters, lr: Adam(parameters, lr=lr)),
    "sgd": (0.1, lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9)),
    "adagrad": (1e-2, lambda parameters, lr: Adagrad(parameters, lr=lr)),
    "rmsprop": (5e-4, lambda parameters, lr: RMSprop(parameters, lr=lr)),
    "adafactor": (1e-2, lambda parameters, lr: Adafactor(parameters, lr=lr)),
}
_MUON_LR = 2e-3

NAMES = [*_BY_NAME, "muon"]


def make_optimizers(name: str, named_parameters: Iterable[tuple[str, Tensor]], lr: float | None) -> list[Optimizer]:
    """The optimizers for a GPT's parameters: one, or for Muon two.

    Args:
        name: one of `NAMES`.
        named_parameters: names as in the model's `named_parameters()`.
        lr: peak learning rate; None for one that suits the optimizer and the tiny model.
    """
    named = list(named_parameters)
    if name != "muon":
        default_lr, make = _BY_NAME[name]
        return [make([parameter for _, parameter in named], default_lr if lr is None else lr)]
    # Muon is for hidden matrices only: embeddings, the output layer, norms and biases go to AdamW.
    lr = _MUON_LR if lr is None else lr
    hidden = [name.startswith("blocks.") and parameter.ndim == 2 for name, parameter in named]
    matrices = [parameter for (_, parameter), is_hidden in zip(named, hidden, strict=True) if is_hidden]
    others = [parameter for (_, parameter), is_hidden in zip(named, hidden, strict=True) if not is_hidden]
    return [torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"), AdamW(others, lr=lr)]


class MasterWeights:
    """fp32 copies of a model's parameters, for an optimizer to step on: what `master_weights: true` computes."""

    def __init__(self, model: nn.Module) -> None:
        self.named_masters = [(name, nn.Parameter(p.detach().float())) for name, p in model.named_parameters()]
        self._pairs = [(p, m) for p, (_, m) in zip(model.parameters(), self.named_masters, strict=True)]

    def take_gradients(self) -> None:
        """Move each gradient to the master, in fp32."""
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters to the parameters."""
        for parameter, master in self._pairs:
            parameter.copy_(master)
