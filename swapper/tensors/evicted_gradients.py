"""Gradients that are not in memory: `p.grad` gives an `EvictedGradient`, and any use of that brings the values back."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_iter

from swapper.errors import SwapError
from swapper.tensors.hollow import hollow_of
from swapper.tensors.homes import LAYOUT, METADATA, Call, StandIn

__all__ = [
    "EvictedGradient",
    "GradientEvictedParameter",
    "GradientHome",
    "bring_back_gradients",
    "clear_gradient_home",
    "evicted_gradient",
    "fill_gradient",
    "gradient_attached",
    "has_evicted_gradient",
    "raw_gradient",
    "set_gradient_home",
    "set_raw_gradient",
]

_HOME = "_swapper_gradient_home"
"""Name of the attribute of a parameter that has a weak reference to the `GradientHome` of its evicted gradient."""

_GRAD = vars(torch._C.TensorBase)["grad"]
"""The attribute as autograd has it, whatever the class of a parameter makes of it."""


_CLEAR = {inspect.unwrap(each.zero_grad).__code__ for each in (torch.optim.Optimizer, torch.nn.Module)}
"""Code that reads `p.grad` to forget it, or to set it to zero."""


class GradientHome(Protocol):
    """Brings gradients back."""

    def gradient_of(self, parameter: torch.nn.Parameter, *, to_clear: bool = False) -> torch.Tensor | None:
        """Give what reading `parameter.grad` gives; with `to_clear` to code that does not want its values."""

    def bring_back(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Have the gradient in memory again, for good."""

    def clear(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Forget the gradients of `parameters`."""

    def set_zero(self, parameter: torch.nn.Parameter) -> None:
        """Let the gradient be zeros; its values are not needed."""


class GradientEvictedParameter(torch.nn.Parameter):
    """The class of a parameter that has its values, and whose gradient is evicted."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; if it is evicted, a tensor whose values come, for good, when they are used."""
        reference = self.__dict__.get(_HOME)
        if reference is None:
            return raw_gradient(self)
        home: GradientHome | None = reference()
        if home is None:
            return evicted_gradient(self, None, ())
        return home.gradient_of(self, to_clear=sys._getframe(1).f_code in _CLEAR)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if isinstance(gradient, EvictedGradient):
            gradient.bring_back()
        before = raw_gradient(self)
        set_raw_gradient(self, gradient)  # First: it refuses what is no gradient of this.
        reference = self.__dict__.get(_HOME)
        if reference is None:
            return
        home: GradientHome | None = reference()
        try:
            if home is not None:
                home.clear([self])
        except BaseException:
            set_raw_gradient(self, before)
            raise
        clear_gradient_home(self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain parameter; as always its gradient is not copied."""
        if id(self) not in memo:
            values = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(values, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        twin = torch.nn.Parameter(self.data, self.requires_grad)
        twin.__dict__.update({name: value for name, value in vars(self).items() if name != _HOME})
        return twin.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class EvictedGradient(StandIn):
    """The evicted gradient of a parameter. It becomes a plain tensor, the same object, when its values are used.

    Attributes:
        parameter: whose gradient it is.
        home: brings it back; None if nothing can any more.
        values_stride: its strides when its values are in memory.
    """

    parameter: torch.nn.Parameter
    home: GradientHome | None
    values_stride: tuple[int, ...]

    @classmethod
    def use(cls, call: Call) -> Any:
        """Run `call`, with the values in memory unless it only asks for metadata or overwrites them with zeros."""
        name, first = call.name, call.first
        if isinstance(first, cls):
            sets = name in ("__set__ requires_grad", "requires_grad_")
            # A gradient has no history and gets none: only setting what it is already leaves it alone.
            if name in METADATA and (not sets or (len(call.args) > 1 and call.args[1] is False)):
                return call.plainly()
            if name in LAYOUT:
                return call.on_layout(first.values_stride)
            if name == "zero_" and first.home is not None:
                first.home.set_zero(first.parameter)
                return first
        if name == "_foreach_zero_" and isinstance(first, (list, tuple)):
            for gradient in first:
                gradient.zero_()
            return None
        for item in tree_iter((call.args, call.kwargs)):
            if isinstance(item, cls):
                item.bring_back()
        return call.func(*call.args, **call.kwargs)

    def bring_back(self) -> None:
        """Have the values: this is a plain tensor then.

        Raises:
            SwapError: they are gone.
            SwapIOError: they could not be read.
        """
        if self.home is not None:
            self.home.bring_back(self.parameter)
        if isinstance(self, EvictedGradient):
            raise SwapError(
                "this gradient was on disk, and its optimizer was closed or is gone: the values cannot be read"
            )


def evicted_gradient(
    parameter: torch.nn.Parameter, home: GradientHome | None, stride: tuple[int, ...]
) -> EvictedGradient:
    """Make what stands for the gradient of `parameter` that `home` has, or nobody, until its values are used."""
    with torch._C.DisableTorchFunctionSubclass():
        values_stride = stride or tuple(torch.empty(parameter.shape, device="meta").stride())
        gradient = hollow_of(EvictedGradient, parameter, values_stride)
        gradient.parameter, gradient.home, gradient.values_stride = parameter, home, values_stride
    return gradient


def fill_gradient(gradient: EvictedGradient, values: torch.Tensor) -> torch.Tensor:
    """Let `values` be those of `gradient`, which is a plain tensor from now on."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient.data = values
    gradient.__dict__.clear()
    gradient.__class__ = torch.Tensor  # type: ignore[assignment]
    return gradient


def raw_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd knows of."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    if isinstance(gradient, EvictedGradient):  # Another parameter's, assigned to this one.
        gradient.bring_back()
    return gradient


def set_raw_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Change the gradient that autograd knows of."""
    _GRAD.__set__(parameter, gradient)


def has_evicted_gradient(parameter: torch.nn.Parameter) -> bool:
    """True if reading `parameter.grad` asks a `GradientHome`."""
    return _HOME in parameter.__dict__


def set_gradient_home(parameter: torch.nn.Parameter, home: GradientHome) -> None:
    """From now on reading `parameter.grad` asks `home`, of which a weak reference is kept."""
    parameter.__dict__[_HOME] = weakref.ref(home)
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = GradientEvictedParameter


def clear_gradient_home(parameter: torch.nn.Parameter) -> None:
    """Undo `set_gradient_home`. Idempotent."""
    parameter.__dict__.pop(_HOME, None)
    if type(parameter) is GradientEvictedParameter:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]


def bring_back_gradients(parameters: Iterable[torch.nn.Parameter], but: Iterable[object] = ()) -> None:
    """Have the evicted gradients of `parameters` in memory, except those that the homes `but` have.

    Raises:
        SwapError: one is gone.
        SwapIOError: one could not be read.
    """
    for p in parameters:
        reference = p.__dict__.get(_HOME)
        if reference is None or any(reference() is home for home in but if home is not None):
            continue
        if isinstance(gradient := p.grad, EvictedGradient):
            gradient.bring_back()


@contextmanager
def gradient_attached(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> Iterator[None]:
    """Within it `gradient` is the parameter's, as if it had never been evicted."""
    home = parameter.__dict__.pop(_HOME)
    set_raw_gradient(parameter, gradient)
    if subclassed := type(parameter) is GradientEvictedParameter:  # With which torch would not choose foreach.
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        set_raw_gradient(parameter, None)
        parameter.__dict__[_HOME] = home
        if subclassed and type(parameter) is torch.nn.Parameter:
            parameter.__class__ = GradientEvictedParameter
