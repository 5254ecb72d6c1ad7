"""Tensors of the state whose memory something else has, too.

A record has a copy of each tensor of the state, which lies elsewhere in each step. So what a class writes through
another tensor on the same memory, or expects to see there, is lost: in plain PyTorch both are one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError
from swapper.optimizer.twin import Twin, same_bits
from swapper.tensors.memory_overlap import overlapping
from swapper.tensors.other_tensors import is_shared

__all__ = ["StateBefore", "refuse_new_aliases"]


_judged: weakref.WeakKeyDictionary[type[Optimizer], set[frozenset[str]]] = weakref.WeakKeyDictionary()
"""Pairs of a class's state that were in the same memory when its trial had ended, and were not written there."""


class StateBefore:
    """A copy of a twin's state from before some steps, to see what they write to."""

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self._before = {at: (tensor, tensor.clone()) for at, tensor in _tensors_of(optimizer)}

    @torch.no_grad()
    def refuse_aliases(self, twin: Twin) -> None:
        """Refuse state that the steps have changed in place, and that shares its memory.

        Call it once: it drops the tensors of before the steps, and the gradients of the twin, which the state may have.

        Raises:
            ConfigError: naming the state, and what the class can do instead.
        """
        name = type(twin.optimizer).__name__
        now = dict(_tensors_of(twin.optimizer))
        written = {at for at, tensor in now.items() if at in self._before and _is_written(tensor, *self._before[at])}
        self._before.clear()
        for parameter in twin.parameters:
            parameter.grad = None
        judged = _judged.setdefault(type(twin.optimizer), set())
        for one, other in overlapping(now):
            if one in written or other in written:
                raise _in_the_same_memory(name, one[1], other[1])
            judged.add(frozenset((one[1], other[1])))
        # A view has the tensor that it is of; several views may have one.
        ours: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in now.values():
            known = ours.setdefault(tensor.untyped_storage()._cdata, {})
            known |= {id(each): each for each in (tensor, tensor._base) if each is not None}
        for at in sorted(written):
            if is_shared(now[at], ours=len(ours[now[at].untyped_storage()._cdata])):
                raise ConfigError(
                    f"{name} keeps another tensor on the memory of its state{at[1]}, such as a view of it in an "
                    "attribute or the data of its parameter, and swapped state is in other memory in each step; take "
                    "it from optimizer.state in each step, or set offload_optimizer.device to none"
                )


def refuse_new_aliases(
    cls: type[Optimizer],
    before: Mapping[str, Any],
    state: Mapping[str, Any],
    parameter: torch.Tensor | None,
    gradient: torch.Tensor | None,
) -> str:
    """Refuse tensors that a step has put into the state of one parameter, where the trial has not seen them so.

    Nothing is looked at but identities where the class has left the tensors that it was given.

    Args:
        before, state: the state before the step and after it.
        parameter: that was stepped, in memory that the state could not be a view of in the next step; None else.
        gradient: the same of its gradient.

    Returns:
        Which of them is in the memory of the gradient; "" for none.

    Raises:
        ConfigError: one of them is in the memory of another tensor of the state, or of the parameter.
    """
    if all(before.get(key) is value and isinstance(value, torch.Tensor) for key, value in state.items()):
        return ""
    given, now = dict(_tensors_in(before, "")), dict(_tensors_in(state, ""))
    new = {at for at, tensor in now.items() if given.get(at) is not tensor}
    if not new:
        return ""
    judged = _judged.get(cls, ())
    for one, other in overlapping(now):
        if (one in new or other in new) and frozenset((one, other)) not in judged:
            raise _in_the_same_memory(cls.__name__, one, other)
    for at in sorted(new):
        if parameter is not None and any(overlapping({"": parameter.detach(), at: now[at]})):
            raise ConfigError(
                f"{cls.__name__} has put the data of a parameter into its state{at}, and swapped state is in other "
                "memory in each step; clone it, or set offload_optimizer.device to none"
            )
    kept = (at for at in new if gradient is not None and any(overlapping({"": gradient, at: now[at]})))
    return next(kept, "")


def _in_the_same_memory(name: str, one: str, other: str) -> ConfigError:
    return ConfigError(
        f"{name} has its state{one} and state{other} in the same memory, and swapped each has its own, so that what is "
        "written to one is not seen in the other; give each memory of its own (clone), or set "
        "offload_optimizer.device to none"
    )


_At = tuple[int, str]
"""The number of a parameter in the state, and the keys of a tensor there, as they are written."""


def _tensors_of(optimizer: Optimizer) -> Iterator[tuple[_At, torch.Tensor]]:
    for number, state in enumerate(optimizer.state.values()):
        yield from (((number, at), tensor) for at, tensor in _tensors_in(state, ""))


def _tensors_in(value: Any, at: str) -> Iterator[tuple[str, torch.Tensor]]:
    if type(value) is torch.Tensor and value.layout == torch.strided:
        yield at, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors_in(each, f"{at}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _tensors_in(each, f"{at}[{i}]")


def _is_written(now: torch.Tensor, before: torch.Tensor, bits: torch.Tensor) -> bool:
    """True if the memory is that of before the step, which is still held, and not its bits."""
    is_there = now.untyped_storage()._cdata == before.untyped_storage()._cdata
    return is_there and not (now.shape == bits.shape and same_bits(now, bits))
