"""Parameters whose values are not in memory.

An evicted parameter stays the object that it was. Its `data` is a hollow tensor, and its class is `EvictedParameter`:
functions that ask for metadata are answered as if nothing had happened, all others wait until the values are in memory
and then run on them as they would have done. So do operators that C++ code calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_iter, tree_map_only

from swapper.errors import SwapError
from swapper.tensors.evicted_gradients import GradientEvictedParameter, has_evicted_gradient
from swapper.tensors.evicted_views import MAKES_PARAMETERS, MAKES_STATE_DICTS, EvictedView, ViewOfParameter, run
from swapper.tensors.hollow import answer_operators, hollow_out, is_hollow, operators_unanswered
from swapper.tensors.homes import ADDRESS, HOME, LAYOUT, METADATA, UNFILLED, Call, Home, StandIn, home_of, present
from swapper.tensors.other_tensors import PATIENCE_S, Patience

__all__ = [
    "EvictedParameter",
    "can_evict_gradient",
    "class_in_memory",
    "evict",
    "is_ordinary",
    "let_viewed_stay",
    "make_ordinary",
    "refuse_copy",
    "restore",
    "restore_for_good",
]

_TensorT = TypeVar("_TensorT", bound=torch.Tensor)


class EvictedParameter(StandIn, GradientEvictedParameter):
    """The class of a parameter while it is evicted."""

    PLAIN = METADATA

    @classmethod
    def use(cls, call: Call) -> Any:
        """Run `call`, with the values in memory unless it only asks for the layout."""
        name, args, func = call.name, call.args, call.func
        home = home_of(call.first)
        if name in LAYOUT and home is not None:
            return call.on_layout(home.stride)
        if name == "data_ptr" and home is not None:
            # Not the address in the pool, where others come next: of two parameters it would be the same.
            copy = vars(call.first)[ADDRESS] = home.mapped_copy()
            return copy.data_ptr()
        if func is torch.autograd.grad:
            return _grad(*args, **call.kwargs)
        if func is torch.autograd.backward and not any(home_of(root) for root in args[0]):
            return _backward(*args, **call.kwargs)
        if func is torch.Tensor.detach:
            caller = call.caller.f_code
            if caller is MAKES_PARAMETERS:  # `torch.nn.Parameter(p)` shares memory, and must be of the same class.
                with present([] if home is None else [home]), torch._C.DisableTorchFunctionSubclass():
                    return call.first.detach().as_subclass(cls)
            if caller is MAKES_STATE_DICTS and home is not None:
                return EvictedView(ViewOfParameter(call.first, home))
        return run(func, args, call.kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.set_`, which does not ask `__torch_function__`."""
        return self.__torch_function__(torch.Tensor.set_, (), (self, *args), kwargs)

    def as_subclass(self, cls: type[_TensorT]) -> _TensorT:
        """As `torch.Tensor.as_subclass`, which does not ask `__torch_function__`."""
        made: _TensorT = self.__torch_function__(torch.Tensor.as_subclass, (), (self, cls))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        home = home_of(self)
        if home is None:
            refuse_copy()
        return home.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


def _edges_of(inputs: Sequence[Any]) -> list[Any]:
    """Stand-ins of autograd's own for `inputs`: it needs to know which they are, not their values.

    Backward runs Python code, which must see evicted parameters for what they are: so a call of autograd has none.
    """
    with torch._C.DisableTorchFunctionSubclass(), operators_unanswered():
        return [get_gradient_edge(p) if isinstance(p, torch.Tensor) else p for p in inputs]


def _grad(outputs: Any, inputs: Sequence[Any], *, materialize_grads: bool = False, **options: Any) -> Any:
    options["allow_unused"] = materialize_grads or options.get("allow_unused", False)
    options["grad_outputs"] = tree_map_only(EvictedParameter, torch.clone, options.get("grad_outputs"))
    gradients = torch.autograd.grad(outputs, _edges_of(inputs), **options)
    if not materialize_grads:
        return gradients
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(inputs, gradients, strict=True))


def _backward(tensors: Sequence[Any], *, inputs: Sequence[Any], **options: Any) -> None:
    torch.autograd.backward(tensors, inputs=_edges_of(inputs), **options)


def _answer(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operator that C++ code called with evicted tensors.

    Raises:
        SwapError: one of them is only a view that was made of an evicted tensor.
    """
    for item in tree_iter((args, kwargs)):
        if not isinstance(item, torch.Tensor) or not is_hollow(item):
            continue
        if not isinstance(item, StandIn) or (isinstance(item, EvictedParameter) and home_of(item) is None):
            raise SwapError(
                f"{operator} was called with a view ({tuple(item.shape)} x {item.dtype}) that C++ code made of an "
                "evicted parameter, and which has no values; use the parameter itself, or make the view within "
                "`with swapper.gathered([parameter])`"
            )
    return run(operator, args, kwargs)


answer_operators(_answer)


def refuse_copy() -> NoReturn:
    """Raise the error of copying or pickling a model."""
    raise SwapError(
        "a model whose parameters are swapped cannot be copied or pickled: the copy would need its own place on the "
        "drive. Copy or save model.state_dict(), or copy the model before swapper.offload"
    )


def evict(parameter: torch.nn.Parameter, home: Home) -> None:
    """Take the values away from `parameter`. It keeps its shape, dtype, version, gradient and hooks."""
    parameter.__dict__[HOME] = home
    if type(parameter) is EvictedParameter or UNFILLED in vars(parameter):  # This is no use of its values.
        parameter.__class__ = torch.nn.Parameter
    hollow_out(parameter, home.stride, home.name)
    parameter.__class__ = EvictedParameter


def restore(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Let `values`, of the parameter's shape and dtype, be its values, without a copy."""
    ordinary = class_in_memory(parameter)
    # There is no call in between, so Ctrl-C cannot leave a parameter of an ordinary class without values.
    parameter.__class__ = ordinary
    parameter.data = values
    if (mark := vars(parameter).get(UNFILLED)) is not None:
        parameter.__class__ = mark.parameter_class


def restore_for_good(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """As `restore`; the parameter has no home any more."""
    parameter.__dict__.pop(HOME, None)
    parameter.__dict__.pop(ADDRESS, None)
    restore(parameter, values)


def class_in_memory(parameter: torch.nn.Parameter) -> type[torch.nn.Parameter]:
    """The class of `parameter` while its values are in memory."""
    return GradientEvictedParameter if has_evicted_gradient(parameter) else torch.nn.Parameter


def is_ordinary(parameter: torch.nn.Parameter) -> bool:
    """True if its class is that of all parameters, as far as swapper did not change it."""
    mark = vars(parameter).get(UNFILLED)
    return type(parameter) in (torch.nn.Parameter, GradientEvictedParameter, mark and mark.parameter_class)


def can_evict_gradient(parameter: torch.Tensor) -> bool:
    """True if `set_gradient_home` works: the class must be that of all parameters."""
    return isinstance(parameter, torch.nn.Parameter) and (type(parameter) is EvictedParameter or is_ordinary(parameter))


def let_viewed_stay(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Leave in memory those whose home is temporary, and whose memory tensors of the user share."""
    patience = Patience(PATIENCE_S)
    for parameter in parameters:
        home = home_of(parameter)
        temporary = None if home is None else home.temporary
        if temporary is not None and patience.outlasted_by(partial(getattr, temporary, "viewed")):
            temporary.stay(parameter)


def make_ordinary(parameter: torch.nn.Parameter) -> None:
    """Give one that `torch.nn.Parameter(...)` made of an evicted one the class that it should have."""
    if type(parameter) is EvictedParameter and home_of(parameter) is None:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
