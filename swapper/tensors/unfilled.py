"""Parameters and buffers that have memory and no values yet: using one raises, and what fills it makes it ordinary.

`materialize` gives a model on the meta device memory. A tensor that its initialiser leaves alone waits for a file, for
a state dict or for the user's own code. Until then its class is one of the two here: writing fills it, views and
conversions are as empty as it is, and reading it is an error with its name.

[Note: how it is known] The memory is filled with bytes that no initialiser leaves: floating numbers are all NaN.
Initialisers run on ordinary tensors, because they write through `.data` and NumPy too; what has the version and the
bytes of before afterwards was not filled. The bytes are looked at again before an error is raised.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from swapper.errors import SwapError
from swapper.tensors.attributes import UNFILLED
from swapper.tensors.evicted import EvictedParameter, class_in_memory
from swapper.tensors.evicted_views import run
from swapper.tensors.homes import LAYOUT, METADATA, Call, StandIn

__all__ = ["fill_with_nothing", "has_nothing", "is_unfilled", "mark_unfilled", "refuse_unfilled"]

_T = TypeVar("_T")

_FLOATING_BYTE = 0xFF
"""Floating numbers of only such bytes are NaN, in every dtype but those that have none."""
_INTEGER_BYTE = 0x9D

_PASSES = frozenset(
    {
        "__repr__", "__format__", "__set__ requires_grad", "_use_count", "is_pinned", "is_shared", "data_ptr",
        "untyped_storage", "storage", "_typed_storage", "storage_offset", "_has_compatible_shallow_copy_type",
    }
)  # fmt: skip
_OVERWRITES = frozenset(
    {
        "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_",
        "log_normal_", "cauchy_", "set_", "__setitem__", "__set__ data", "_foreach_copy_", "_foreach_zero_",
        "masked_fill_", "masked_scatter_", "index_copy_", "index_fill_", "scatter_", "put_", "fill_diagonal_",
    }
)  # fmt: skip
_CARRIES_ON = frozenset(
    {
        "detach", "__get__ data", "view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unflatten",
        "__getitem__", "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "__get__ T", "__get__ mT",
        "__get__ H", "__get__ mH", "__get__ real", "narrow", "select", "expand", "expand_as", "squeeze", "unsqueeze",
        "as_strided", "unbind", "split", "chunk", "tensor_split", "diagonal", "unfold", "view_as_real",
        "view_as_complex", "alias", "as_subclass",
        "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
        "cpu", "cuda", "clone", "contiguous", "pin_memory",
    }
)  # fmt: skip
"""Views and conversions: their results are as empty as their arguments."""
_LIKES = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"})


class _Mark:
    """Common to all tensors that share the memory of one without values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.filled = False
        self.owner: weakref.ref[torch.Tensor] | None = None
        self.parameter_class = _UnfilledParameter  # `evicted.restore` gives it to an owner that is attached.

    def fill(self) -> None:
        self.filled = True
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            _make_ordinary(owner)

    def refuse(self, tensor: torch.Tensor) -> None:
        refuse_unfilled(tensor)


class _Unfilled(StandIn):
    @classmethod
    def use(cls, call: Call) -> Any:
        """Run `call` if it does not read what has no values.

        Raises:
            SwapError: it does.
        """
        name, func, args, kwargs, _ = call
        if (name in METADATA or name in LAYOUT or name in _PASSES) and not call.is_saving():
            return call.plainly()
        marked = []
        for item in tree_iter((args, kwargs)):
            if (mark := _mark_of(item)) is None:
                continue
            if mark.filled:
                _make_ordinary(item)
            else:
                marked.append(item)
        if not marked:
            return func(*args, **kwargs)
        if name in _CARRIES_ON:
            return _carry_on(run(func, args, kwargs, bare=True), marked[0])
        is_converted = name == "__set__ data" and _mark_of(args[1]) is not None  # As empty as before.
        if name in _LIKES or name.startswith("new_") or is_converted:
            return run(func, args, kwargs, bare=True)
        written: list[Any] = []
        if name in _OVERWRITES or getattr(func, "__module__", "") == "torch.nn.init":
            written = list(tree_iter(args[0] if args else kwargs.get("tensor")))
        elif kwargs.get("out") is not None:
            written = list(tree_iter(kwargs["out"]))
        marks = [mark for item in written if (mark := _mark_of(item)) is not None]
        for item in marked:
            mark = _mark_of(item)
            if mark is not None and mark not in marks:
                _check(item, mark)
        result = run(func, args, kwargs, bare=True)
        for mark in marks:
            mark.fill()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            mark = _mark_of(self)
            with torch._C.DisableTorchFunctionSubclass():
                values = self.detach().as_subclass(torch.Tensor).clone(memory_format=torch.preserve_format)
                copy = (
                    torch.nn.Parameter(values, self.requires_grad) if isinstance(self, _UnfilledParameter) else values
                )
            if mark is not None:
                mark_unfilled(copy, mark.name)
            memo[id(self)] = copy
        made: torch.Tensor = memo[id(self)]
        return made


class _UnfilledParameter(_Unfilled, torch.nn.Parameter):
    """A parameter, in memory."""


def _mark_of(item: object) -> _Mark | None:
    return item.__dict__.get(UNFILLED) if isinstance(item, torch.Tensor) else None


def _make_ordinary(tensor: torch.Tensor) -> None:
    tensor.__dict__.pop(UNFILLED, None)
    if isinstance(tensor, _UnfilledParameter):
        tensor.__class__ = class_in_memory(tensor)  # type: ignore[assignment]
    elif isinstance(tensor, _Unfilled):
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]


def _carry_on(result: _T, of: torch.Tensor) -> _T:
    """`result`, a view or conversion of `of`, as empty as that."""
    mark = _mark_of(of)
    assert mark is not None

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is of or type(tensor) is not torch.Tensor:
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            same = tensor.untyped_storage()._cdata == of.untyped_storage()._cdata
        if same:
            tensor.__class__ = _Unfilled
            tensor.__dict__[UNFILLED] = mark
        else:
            mark_unfilled(tensor, mark.name)
        return tensor

    carried: _T = tree_map_only(torch.Tensor, empty, result)
    return carried


def _check(tensor: torch.Tensor, mark: _Mark) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        nothing = has_nothing(tensor)
    if nothing:
        raise SwapError(
            f"{mark.name} is used, and nothing has filled it since swapper.materialize gave it memory; fill it in the "
            "initialiser, load it, or write to it before it is used"
        )
    mark.fill()
    _make_ordinary(tensor)


def fill_with_nothing(tensor: torch.Tensor) -> None:
    """Fill the memory of `tensor` with bytes that `has_nothing` knows. Its version stays."""
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    memory.fill_(_FLOATING_BYTE if floating else _INTEGER_BYTE)


@torch.no_grad()
def has_nothing(tensor: torch.Tensor) -> bool:
    """True if every element of `tensor`, which is in memory, is as `fill_with_nothing` left it."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor).all())
    return bool((tensor.detach().contiguous().reshape(-1).view(torch.uint8) == _INTEGER_BYTE).all())


def mark_unfilled(tensor: torch.Tensor, name: str) -> None:
    """From now on using `tensor`, a parameter or a buffer with undefined content, raises, until something fills it.

    Args:
        tensor: in memory or evicted.
        name: for the error.
    """
    mark = _Mark(name)
    mark.owner = weakref.ref(tensor)
    tensor.__dict__[UNFILLED] = mark
    if type(tensor) is torch.Tensor:
        tensor.__class__ = _Unfilled
    elif not isinstance(tensor, EvictedParameter):
        tensor.__class__ = _UnfilledParameter


def is_unfilled(tensor: torch.Tensor) -> bool:
    """True if `tensor`, in memory, still has no values."""
    mark = _mark_of(tensor)
    if mark is None or mark.filled:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return has_nothing(tensor)


def refuse_unfilled(tensor: torch.Tensor) -> None:
    """Raise the error of a use of `tensor`, in memory or evicted, if it still has no values.

    Raises:
        SwapError: it has none.
    """
    mark = _mark_of(tensor)
    if mark is not None and not mark.filled:
        run(_check, (tensor, mark), {}, bare=True)
