"""Gradients that are not in memory: `p.grad` gives an `EvictedGradient`, and any use of that brings the values back."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_iter

from swapper.errors import SwapError
from swapper.tensors.hollow import answer_within_classes, hollow_of
from swapper.tensors.homes import LAYOUT, METADATA, Call, StandIn
from swapper.tensors.reduced import is_reduction
from swapper.tensors.sharded import Sharding, is_sharded, local_of, sharded_like

__all__ = [
    "ZEROES",
    "EvictedGradient",
    "GradientEvictedParameter",
    "GradientHome",
    "bring_back_gradients",
    "can_have_gradient_home",
    "clear_gradient_home",
    "evicted_gradient",
    "fill_gradient",
    "gradient_attached",
    "has_evicted_gradient",
    "note_kept_gradient",
    "raw_gradient",
    "return_raw_gradient",
    "set_gradient_home",
    "set_raw_gradient",
    "set_zero",
    "shown",
]

_HOME = "_swapper_gradient_home"
"""Name of the attribute of a parameter that has a weak reference to the `GradientHome` of its evicted gradient."""

_ATTACHED = "_swapper_attached_gradient_home"
"""The same while the gradient is at the parameter for a step."""

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

    def note_kept(self, parameter: torch.nn.Parameter, where: str) -> None:
        """The state of `parameter` has a copy of this gradient, of which the class has kept the tensor itself."""

    def gradient_to_add_to(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Give FSDP2, which has reduced another gradient of `parameter`, the one in memory that it adds that to.

        None: that one is added to what is evicted, when its hook is called.
        """


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
        if (stand_in := _stand_in_of(gradient)) is not None:
            stand_in.bring_back()
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


@functools.cache
def _sharded_class() -> Any:
    """The same for a DTensor. Made when it is needed: then the module of those is imported."""
    from torch.distributed.tensor import DTensor

    class GradientEvictedDTensor(DTensor):
        @property
        def grad(self: Any) -> torch.Tensor | None:
            reference = self.__dict__.get(_HOME)
            home: GradientHome | None = None if reference is None else reference()
            if home is None:
                return raw_gradient(self) if reference is None else evicted_gradient(self, None, ())
            code = sys._getframe(1).f_code
            if is_reduction(code):
                return home.gradient_to_add_to(self)
            return home.gradient_of(self, to_clear=code in _CLEAR)

        @grad.setter
        def grad(self: Any, gradient: torch.Tensor | None) -> None:
            if is_reduction(sys._getframe(1).f_code):
                set_raw_gradient(self, gradient)  # What is evicted stays so: see `gradient_to_add_to`.
                return
            GradientEvictedParameter.grad.__set__(self, gradient)  # type: ignore[attr-defined]

        @grad.deleter
        def grad(self: Any) -> None:
            self.grad = None

        def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
            with _without_home(self):
                return copy.deepcopy(self, memo)

        def __reduce_ex__(self: Any, protocol: Any) -> Any:
            with _without_home(self):
                return self.__reduce_ex__(protocol)

    return GradientEvictedDTensor


@contextmanager
def _without_home(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Within it `parameter`, whose gradient is evicted, is one without a gradient."""
    home = parameter.__dict__[_HOME]
    clear_gradient_home(parameter)
    try:
        yield
    finally:
        set_gradient_home(parameter, home())


class EvictedGradient(StandIn):
    """The evicted gradient of a parameter. It becomes a plain tensor, the same object, when its values are used.

    Attributes:
        parameter: whose gradient it is.
        home: brings it back; None if nothing can any more.
        values_stride: its strides when its values are in memory.
        around: of a shard, the DTensor that the user sees, if somebody has that. This is its local tensor then.
    """

    parameter: torch.nn.Parameter
    home: GradientHome | None
    values_stride: tuple[int, ...]
    around: weakref.ref[torch.Tensor] | None

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
            if name in ("zero_", "zero_.default") and first.home is not None:
                first.home.set_zero(first.parameter)
                return first
        if name in ("_foreach_zero_", "_foreach_zero_.default") and isinstance(first, (list, tuple)):
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


ZEROES = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}
"""Operators that overwrite their first argument, a tensor or several, with zeros."""


def set_zero(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Let those of `gradients` be zeros that are evicted; nothing is read. Returns the others."""
    others = []
    for each in gradients:
        if isinstance(each, EvictedGradient) and each.home is not None:
            each.home.set_zero(each.parameter)
        else:
            others.append(each)
    return others


def evicted_gradient(
    parameter: torch.nn.Parameter, home: GradientHome | None, stride: tuple[int, ...], *, of_shard: bool = False
) -> EvictedGradient:
    """Make what stands for the gradient of `parameter` that `home` has, or nobody, until its values are used.

    With `of_shard` it is the local tensor of a DTensor's gradient, and `shown` is what the user sees.
    """
    if of_shard:
        answer_within_classes()  # The operators of DTensors.
    like = local_of(parameter) if of_shard else parameter
    with torch._C.DisableTorchFunctionSubclass():
        values_stride = stride or tuple(torch.empty(like.shape, device="meta").stride())
        gradient = hollow_of(EvictedGradient, like, values_stride)
        gradient.parameter, gradient.home, gradient.values_stride = parameter, home, values_stride
        gradient.around = None
    return gradient


def shown(gradient: EvictedGradient) -> torch.Tensor:
    """Return the value of `p.grad`: `gradient`, or the DTensor around it, the same one while somebody has it."""
    if not is_sharded(gradient.parameter):
        return gradient
    around = None if gradient.around is None else gradient.around()
    if around is None:
        around = Sharding.of(gradient.parameter).with_local(gradient)
        gradient.around = weakref.ref(around)
    return around


def fill_gradient(gradient: EvictedGradient, values: torch.Tensor) -> torch.Tensor:
    """Let `values` be those of `gradient`, which is a plain tensor from now on. Returns what was `shown`."""
    seen = shown(gradient)
    with torch._C.DisableTorchFunctionSubclass():
        gradient.data = values
    gradient.__dict__.clear()
    gradient.__class__ = torch.Tensor  # type: ignore[assignment]
    return seen


def _stand_in_of(gradient: torch.Tensor | None) -> EvictedGradient | None:
    """Return the evicted gradient: `gradient` itself, or the local tensor of a DTensor; None if it is not evicted."""
    local = None if gradient is None else local_of(gradient)
    return local if isinstance(local, EvictedGradient) else None


def raw_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd knows of."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    if (stand_in := _stand_in_of(gradient)) is not None:  # Another parameter's, assigned to this one.
        stand_in.bring_back()
    return gradient


def can_have_gradient_home(parameter: torch.Tensor) -> bool:
    """True of a DTensor for which `set_gradient_home` works."""
    return is_sharded(parameter) and type(parameter) in (_sharded_class(), _sharded_class().__base__)


def set_raw_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Change the gradient that autograd knows of."""
    _GRAD.__set__(parameter, gradient)


def return_raw_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Let autograd know of `gradient` again, which it had for `parameter` before.

    The parameter may have another dtype or shape since then: `model.half()` converts it first, then its gradient.
    """
    if (gradient.dtype, gradient.shape) == (parameter.dtype, parameter.shape):
        set_raw_gradient(parameter, gradient)
        return
    data = parameter.data
    try:
        parameter.data = gradient  # Torch compares the two when a gradient is set, and not when data is.
        set_raw_gradient(parameter, gradient)
    finally:
        parameter.data = data


def has_evicted_gradient(parameter: torch.nn.Parameter) -> bool:
    """True if reading `parameter.grad` asks a `GradientHome`."""
    return _HOME in parameter.__dict__


def note_kept_gradient(parameter: torch.nn.Parameter, where: str) -> None:
    """See `GradientHome.note_kept`; `parameter` may have none. For a step, within `gradient_attached` too."""
    reference = parameter.__dict__.get(_HOME) or parameter.__dict__.get(_ATTACHED)
    home: GradientHome | None = None if reference is None else reference()
    if home is not None:
        home.note_kept(parameter, where)


def set_gradient_home(parameter: torch.nn.Parameter, home: GradientHome) -> None:
    """From now on reading `parameter.grad` asks `home`, of which a weak reference is kept."""
    parameter.__dict__[_HOME] = weakref.ref(home)
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = GradientEvictedParameter
    elif is_sharded(parameter):
        parameter.__class__ = _sharded_class()


def clear_gradient_home(parameter: torch.nn.Parameter) -> None:
    """Undo `set_gradient_home`. Idempotent."""
    parameter.__dict__.pop(_HOME, None)
    if type(parameter) is GradientEvictedParameter:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
    elif is_sharded(parameter) and type(parameter) is _sharded_class():
        parameter.__class__ = _sharded_class().__base__


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
        if (stand_in := _stand_in_of(p.grad)) is not None:
            stand_in.bring_back()


@contextmanager
def gradient_attached(parameter: torch.nn.Parameter, local: torch.Tensor) -> Iterator[None]:
    """Within it the parameter's gradient is the one whose local tensor is `local`, as if it had never been evicted."""
    home = parameter.__dict__[_ATTACHED] = parameter.__dict__.pop(_HOME)
    set_raw_gradient(parameter, sharded_like(local, parameter))
    if subclassed := type(parameter) is GradientEvictedParameter:  # With which torch would not choose foreach.
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        set_raw_gradient(parameter, None)
        parameter.__dict__[_HOME] = home
        parameter.__dict__.pop(_ATTACHED, None)
        if subclassed and type(parameter) is torch.nn.Parameter:
            parameter.__class__ = GradientEvictedParameter
