"""`probe_native_steps`: which of torch's optimizers the native core steps on this machine, with this torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import optim

from swapper.optimizer.class_step import ClassStep
from swapper.optimizer.native_step import NativeSteps
from swapper.optimizer.step_program import best_instruction_set

__all__ = ["NativeProbe", "instruction_set", "probe_native_steps"]

_PROBED: dict[str, Callable[..., optim.Optimizer]] = {
    "AdamW(fused=True)": partial(optim.AdamW, fused=True),
    "AdamW": optim.AdamW,
    "Adam": optim.Adam,
    "SGD(momentum)": partial(optim.SGD, lr=1e-3, momentum=0.9),
    "Adagrad": optim.Adagrad,
    "RMSprop": optim.RMSprop,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "ASGD": optim.ASGD,
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "Rprop": optim.Rprop,
}


@dataclass(frozen=True)
class NativeProbe:
    """The result of the probe of one optimizer.

    Attributes:
        optimizer: its class, with options.
        native: it can be stepped natively, with the bits of its class.
        reason: why not; "" if it is.
    """

    optimizer: str
    native: bool
    reason: str


def instruction_set() -> str:
    """The instructions that native steps use on this processor."""
    return ("AVX-512", "AVX2", "no vector instructions of its own")[best_instruction_set()]


def probe_native_steps() -> tuple[NativeProbe, ...]:
    """Try torch's elementwise optimizers on small tensors, as wrapping one of them does."""
    probes = []
    for name, make in _PROBED.items():
        optimizer = make([torch.nn.Parameter(torch.zeros(2, device="cpu"))])
        steps = NativeSteps(ClassStep(type(optimizer), remote=False), "on")
        reason = steps.probe(optimizer, 0, 1)
        probes.append(NativeProbe(name, not reason, reason))
    return tuple(probes)
