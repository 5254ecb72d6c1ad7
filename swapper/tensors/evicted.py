"""Parameters, and other tensors of a model, whose values are not in memory.

An evicted parameter stays the object that it was. Its `data` is a hollow tensor, and its class is `EvictedParameter`:
functions that ask for metadata are answered as if nothing had happened, all others wait until the values are in memory
and then run on them as they would have done. So do operators that C++ code calls. A buffer, or a tensor inside a
quantised one, is an `EvictedTensor` in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_iter, tree_map_only

from swapper.errors import SwapError
from swapper.tensors.attributes import ADDRESS, HOME, UNFILLED
from swapper.tensors.evicted_gradients import (
    ZEROES,
    GradientEvictedParameter,
    can_have_gradient_home,
    has_evicted_gradient,
    set_zero,
)
from swapper.tensors.evicted_parts import PARTWISE, answer_by_parts
from swapper.tensors.evicted_views import (
    KEEPS_A_MODEL,
    MAKES_ALIASES,
    MAKES_PARAMETERS,
    MAKES_STATE_DICTS,
    EvictedView,
    ViewOfParameter,
    one_by_one,
    parts_of,
    run,
)
from swapper.tensors.grad_modes import outside_of_inference
from swapper.tensors.hollow import (
    answer_operators,
    answer_within_classes,
    hollow_values,
    is_hollow,
    operators_unanswered,
)
from swapper.tensors.homes import LAYOUT, METADATA, Call, Home, StandIn, home_of, present
from swapper.tensors.inner import has_own_class
from swapper.tensors.other_tensors import PATIENCE_S, Patience
from swapper.tensors.sharded import is_sharded

__all__ = [
    "EvictedParameter",
    "EvictedTensor",
    "can_evict_gradient",
    "class_in_memory",
    "evict",
    "is_evicted",
    "is_ordinary",
    "let_viewed_stay",
    "make_ordinary",
    "refuse_copy",
    "refuse_pickle",
    "restore",
    "restore_for_good",
]

_TensorT = TypeVar("_TensorT", bound=torch.Tensor)


class _Evicted(StandIn):
    """The class of a tensor while it is evicted."""

    PLAIN = METADATA

    @classmethod
    def use(cls, call: Call) -> Any:
        """Run `call`, with the values in memory unless it only asks for the layout."""
        name, args, func = call.name, call.args, call.func
        home = home_of(call.first)
        if name in PARTWISE and (answer := answer_by_parts(call)) is not NotImplemented:
            return answer
        if name.startswith("_foreach_") and (answer := one_by_one(call)) is not NotImplemented:
            return answer
        if name in LAYOUT and home is not None:
            return call.on_layout(home.stride)
        if name == "data_ptr" and home is not None:
            # Not the address in the pool, where others come next: of two parameters it would be the same.
            copy = vars(call.first)[ADDRESS] = home.mapped_copy()
            return copy.data_ptr()
        if name == "share_memory_" and home is not None:  # It would move the values out of the pool, for good.
            raise SwapError(
                f"{home.name} is swapped, so its values cannot be moved to shared memory: call share_memory before "
                "swapper.offload, and offload_param.device: none, or let each process load a model of its own"
            )
        if func in MAKES_ALIASES and cls is EvictedTensor and home is not None:  # By the class around it.
            return EvictedView(ViewOfParameter(call.first, home))
        if func is torch.autograd.grad:
            return _grad(*args, **call.kwargs)
        if func is torch.autograd.backward and not any(home_of(root) for root in args[0]):
            return _backward(*args, **call.kwargs)
        if func is torch.Tensor.detach:
            caller = call.caller.f_code
            if caller is MAKES_PARAMETERS and not issubclass(cls, torch.nn.Parameter):
                raise SwapError(
                    "a parameter cannot be made of a buffer that is swapped, or of a tensor inside a parameter; make "
                    "it a copy first (clone)"
                )
            if caller is MAKES_PARAMETERS:  # `torch.nn.Parameter(p)` shares memory, and must be of the same class.
                with present([] if home is None else [home]), torch._C.DisableTorchFunctionSubclass():
                    # Not `as_subclass`: that makes a view, whose base would keep this memory of the pool for good.
                    return torch.Tensor._make_subclass(cls, call.first.detach())
            by_name = caller.co_name == MAKES_STATE_DICTS.co_name  # Of a module's own.
            if (by_name or caller in (MAKES_STATE_DICTS, KEEPS_A_MODEL)) and home is not None:
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
        if home is None and make_ordinary(self):
            return deepcopy(self, memo)
        if home is None:
            refuse_copy("a view that C++ code made of a swapped parameter")
        return home.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not make_ordinary(self):
            refuse_pickle()
        return self.__reduce_ex__(protocol)


class EvictedParameter(_Evicted, GradientEvictedParameter):
    """The class of a parameter while it is evicted."""


class EvictedTensor(_Evicted):
    """The class of a buffer, or of a tensor inside a parameter, while it is evicted.

    Others make state dicts of the tensors themselves, so they are copied and pickled as those of state dicts are.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        home = home_of(self)
        if home is None or home.temporary is not None:
            return self._as_view().__deepcopy__(memo)
        return home.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        view: Any = self._as_view()
        return view.__reduce_ex__(protocol)

    def _as_view(self) -> EvictedView:
        home = home_of(self)
        if home is None:
            refuse_copy("a tensor whose swapper is gone")
        return EvictedView(ViewOfParameter(self, home))


def is_evicted(tensor: torch.Tensor) -> bool:
    """True while `tensor` has no values in memory; also for one that `torch.nn.Parameter(...)` made of such a one."""
    return isinstance(tensor, _Evicted)


def _edges_of(inputs: Sequence[Any]) -> list[Any]:
    """Stand-ins of autograd's own for `inputs`: it needs to know which they are, not their values.

    Backward runs Python code, which must see evicted parameters for what they are: so a call of autograd has none.
    """
    with torch._C.DisableTorchFunctionSubclass(), operators_unanswered():
        return [get_gradient_edge(p) if isinstance(p, torch.Tensor) else p for p in inputs]


def _grad(outputs: Any, inputs: Sequence[Any], *, materialize_grads: bool = False, **options: Any) -> Any:
    options["allow_unused"] = materialize_grads or options.get("allow_unused", False)
    options["grad_outputs"] = tree_map_only(_Evicted, torch.clone, options.get("grad_outputs"))
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
        if not isinstance(item, StandIn) or (isinstance(item, _Evicted) and home_of(item) is None):
            raise SwapError(
                f"{operator} was called with a view ({tuple(item.shape)} x {item.dtype}) that C++ code made of an "
                "evicted parameter, and which has no values; use the parameter itself, or make the view within "
                "`with swapper.gathered([parameter])`"
            )
    first = args[0] if args else None
    if operator in MAKES_ALIASES and isinstance(first, EvictedTensor) and (home := home_of(first)) is not None:
        # The class around it makes another of its kind, as for a state dict: an alias of the values would keep them.
        return EvictedView(ViewOfParameter(first, home))
    if operator in ZEROES:  # Of a DTensor, by `zero_grad`; else `EvictedGradient.use` has seen to it.
        several: Any = first if isinstance(first, (list, tuple)) else [first]
        for each in set_zero(several):
            run(torch.ops.aten.zero_.default, (each,), {})
        return None if several is first else first
    return run(operator, args, kwargs)


answer_operators(_answer)


def refuse_pickle() -> NoReturn:
    """Raise the error of pickling a model."""
    raise SwapError(
        "a model whose parameters are swapped cannot be pickled. Save model.state_dict(), or pickle "
        "copy.deepcopy(model), whose parameters are ordinary ones"
    )


def refuse_copy(what: str) -> NoReturn:
    """Raise the error of copying a part of a model that has no ordinary counterpart."""
    raise SwapError(
        f"{what} cannot be copied while it is swapped. Copy model.state_dict(), or the model before swapper.offload"
    )


def evict(tensor: torch.Tensor, home: Home) -> None:
    """Take the values away from `tensor`. It keeps its shape, dtype, version, gradient and hooks."""
    tensor.__dict__[HOME] = home
    evicted: type[torch.Tensor] = EvictedTensor
    if isinstance(tensor, torch.nn.Parameter):
        if has_own_class(tensor):
            vars(tensor).setdefault(_CLASS, type(tensor))
        own = vars(tensor).get(_CLASS)
        evicted = EvictedParameter if own is None else _class_of_both(EvictedParameter, own)
    else:
        answer_within_classes()
    # Outside of inference mode, else a parameter would be one of that mode, and of no use after it. And whatever class
    # it is of, this is no use of its values.
    with outside_of_inference(), torch._C.DisableTorchFunctionSubclass():
        values = hollow_values(tensor, home.stride, home.name)
        # There is no call in between, so Ctrl-C cannot leave a tensor of an ordinary class without values.
        tensor.data = values
        tensor.__class__ = evicted


_CLASS = "_swapper_class"
"""Name of the attribute of a parameter that has the class that it is of in memory, where that is not torch's."""


@functools.cache
def _class_of_both(kind: type[torch.Tensor], own: type[torch.Tensor]) -> Any:
    """The class of a parameter that is of `kind` now and of the class `own` in memory, which others ask for."""
    return type(own.__name__, (kind, own), {"__module__": own.__module__})


class _Attached(torch.Tensor):
    """The class of a parameter of a class of others that is attached.

    Autograd functions of bitsandbytes keep a view of the weight where no hook sees it, until backward. It is a view
    that brings the values when it is used, so that the record can leave meanwhile.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func in _KEPT_VIEWS and not kwargs and isinstance(first, cls) and (home := home_of(first)) is not None:
            with torch._C.DisableTorchFunctionSubclass():
                part = parts_of(ViewOfParameter(first, home), lambda like: func(like, *args[1:]))
            if part is not None:
                return EvictedView(part)
        ordinary: Any = super().__torch_function__
        return ordinary(func, types, args, kwargs or {})


_KEPT_VIEWS = (torch.Tensor.view, torch.Tensor.t)


def restore(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let `values`, of its shape and dtype, be the values of `tensor`, without a copy."""
    ordinary = class_in_memory(tensor)
    # There is no call in between, so Ctrl-C cannot leave a parameter of an ordinary class without values.
    tensor.__class__ = ordinary
    tensor.data = values
    if (own := vars(tensor).get(_CLASS)) is not None:
        tensor.__class__ = _class_of_both(_Attached, own) if HOME in vars(tensor) else own
    elif (mark := vars(tensor).get(UNFILLED)) is not None:
        tensor.__class__ = mark.parameter_class


def restore_for_good(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """As `restore`; it has no home any more."""
    tensor.__dict__.pop(HOME, None)
    tensor.__dict__.pop(ADDRESS, None)
    restore(tensor, values)
    tensor.__dict__.pop(_CLASS, None)


def class_in_memory(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of `tensor` while its values are in memory, as far as torch's own classes go."""
    if not isinstance(tensor, torch.nn.Parameter):
        return torch.Tensor
    return GradientEvictedParameter if has_evicted_gradient(tensor) else torch.nn.Parameter


def is_ordinary(parameter: torch.Tensor) -> bool:
    """True if its class is that of all parameters, as far as swapper did not change it."""
    mark = vars(parameter).get(UNFILLED)
    return type(parameter) in (torch.nn.Parameter, GradientEvictedParameter, mark and mark.parameter_class)


def can_evict_gradient(parameter: torch.Tensor) -> bool:
    """True if `set_gradient_home` works: the class must be that of all parameters, or of DTensors."""
    if is_sharded(parameter):
        return can_have_gradient_home(parameter)
    return isinstance(parameter, torch.nn.Parameter) and (type(parameter) is EvictedParameter or is_ordinary(parameter))


def let_viewed_stay(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Leave in memory those whose home is temporary, and whose memory tensors of the user share."""
    patience = Patience(PATIENCE_S)
    for parameter in parameters:
        home = home_of(parameter)
        temporary = None if home is None else home.temporary
        if temporary is not None and patience.outlasted_by(partial(getattr, temporary, "viewed")):
            temporary.stay(parameter)


def make_ordinary(parameter: torch.Tensor) -> bool:
    """Give one that `torch.nn.Parameter(...)` made of an evicted one the class that it should have.

    Returns:
        True if it was such a one. It has values, in memory of its own or of a record, for as long as it lives.
    """
    made = type(parameter) is EvictedParameter and home_of(parameter) is None and not is_hollow(parameter)
    if made:
        parameter.__class__ = class_in_memory(parameter)
    return made
