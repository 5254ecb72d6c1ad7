"""Hollow tensors: they have a shape, strides, a dtype and a device, and no memory. Evicted tensors are made of them.

[Note: what C++ sees] Only Python code asks `__torch_function__` before it uses a tensor. TorchScript, extensions,
autograd, collectives and whatever runs within `DisableTorchFunctionSubclass` work on the tensor as it is, so it must
not look like one with values. Two things see to that:

- It has a dispatch key that no kernel of torch is for, `DeferredInit`. The fallback of that key is Python code of ours,
  and the dispatcher calls it in place of every operator that gets such a tensor, before autograd. Within a
  `TorchDispatchMode` torch does not find that fallback, and raises. Within the `__torch_dispatch__` of a class, such as
  a quantised tensor that has hollow ones inside, that key and autograd's are switched off: there a second one, `FPGA`,
  stands in, with the same fallback, whose place is below.
- Its storage has a length and no memory. Torch raises where C++ code asks for an address to write to, for one of a
  type, or for a storage to share or to save. Builds for CUDA and ROCm let a storage raise whatever is asked; in others
  C++ code that asks for `const void*` gets nullptr.

Torch compares the keys of tensors on devices of other makers (PrivateUse1) when `data` is set, so those have none. They
share one NaN, or the least integer, whose storage raises where torch, or the module of the device, can let it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from swapper.tensors.dispatch_modes import outside_of_dispatch_modes
from swapper.tensors.grad_modes import outside_of_inference

__all__ = [
    "answer_operators",
    "answer_within_classes",
    "answers_for",
    "hollow_of",
    "hollow_values",
    "is_hollow",
    "operators_unanswered",
    "shows_reads",
]

_TensorT = TypeVar("_TensorT", bound=torch.Tensor)

_NAMES = ("DeferredInit", "FPGA")
_UNANSWERED = ("_has_compatible_shallow_copy_type", "is_same_size", "dense_dim", "sparse_dim")
"""Operators that read no values: `p.data = values` calls the first."""

_COMPATIBLE = frozenset({"cpu", "cuda", "xpu", "mps", "hpu", "mtia"})
"""Types of devices whose tensors torch lets change their dispatch keys in `p.data = ...`: not those of other makers."""

_ACCESS = (
    "{} is evicted, and C++ code asks for the address of its values; use it in the forward of its module, or within "
    "`with swapper.gathered([parameter])`"
)

_log = logging.getLogger("swapper")

_NAMESPACES = ("aten", "prims")
_answers: list[Callable[..., Any]] = []
_keys: torch._C.DispatchKeySet | None = None
_libraries: list[torch.library.Library] = []
"""Operators stay registered as long as these live."""


class _NoMemory(torch.Tensor):
    """The class of tensors without memory, which torch requires. No tensor of it is given away."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(func)


def answer_operators(answer: Callable[..., Any]) -> None:
    """From now on `answer(operator, *args, **kwargs)` is called in place of operators that get hollow tensors.

    Called once. Where this torch does not know how, hollow tensors are NaN, as the log says.
    """
    global _keys
    library: Any = torch.library.Library
    try:
        operators, fallbacks = (library(name, "IMPL") for name in ("aten", "_"))
        for key in _NAMES:
            fallbacks.fallback(answer, key)  # First: it fails if somebody else has the key.
            for name in _UNANSWERED:
                operators.impl(name, torch.library.fallthrough_kernel, key)
        _libraries.extend((operators, fallbacks))
        keys = [torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key)) for key in _NAMES]
        _keys = keys[0] | keys[1]
        _answers.append(answer)
    except (AttributeError, RuntimeError) as error:
        _log.warning("what C++ code reads of evicted parameters unforeseen is NaN, without an error: %s", str(error))


@functools.cache
def answer_within_classes() -> None:
    """From now on what was given to `answer_operators` is called within `__torch_dispatch__` too. Idempotent.

    Below autograd an operator that has one kernel for all devices goes before a fallback: each of those is registered.
    It takes a tenth of a second, and only tensors inside others need it.
    """
    for answer in _answers:
        names: set[str] = set()
        for alias in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
            names.update(torch._C._dispatch_get_registrations_for_dispatch_key(alias))
        libraries: dict[str, Any] = {}
        library_of: Any = torch.library.Library
        for qualified in sorted(names):
            namespace, name = qualified.split("::")
            operator, _, overload = name.partition(".")
            if namespace not in _NAMESPACES or operator in _UNANSWERED:
                continue
            library = libraries.setdefault(namespace, library_of(namespace, "IMPL"))
            packet = getattr(getattr(torch.ops, namespace), operator)
            library.impl(name, functools.partial(answer, getattr(packet, overload or "default")), _NAMES[1])
        _libraries.extend(libraries.values())


def hollow_of(cls: type[_TensorT], like: torch.Tensor, stride: tuple[int, ...]) -> _TensorT:
    """Make a hollow tensor of class `cls`, of the shape, dtype and device of `like`."""
    with outside_of_dispatch_modes(), outside_of_inference(), torch._C.DisableTorchFunctionSubclass():
        made: _TensorT = torch.Tensor._make_subclass(cls, torch.empty(0, dtype=like.dtype, device=like.device))
        made.data = hollow_values(like, stride, f"a tensor of shape {tuple(like.shape)}")
        return made


def hollow_values(like: torch.Tensor, stride: tuple[int, ...], name: str) -> torch.Tensor:
    """Return values for the `data` of a tensor as `like`, outside of inference mode, so that it has no memory.

    In inference mode torch would dispatch to the class of what is returned.

    Args:
        stride: that the tensor shall have. It is expanded where there is no key.
        name: of the tensor, for errors.
    """
    if _keys is None or like.device.type not in _COMPATIBLE:
        return _nan(like.dtype, like.device, _refuse_access).expand(like.shape)
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _NoMemory, like.shape, strides=stride, dtype=like.dtype, device=like.device, _extra_dispatch_keys=_keys
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    if _refuse_access is not None:
        _refuse_access(made.untyped_storage()._cdata, _ACCESS.format(name))
    return made


_refuse_access: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
"""Lets the storage of that address raise when anybody asks for its own. Builds for CUDA and ROCm have it."""


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device, refuse: Callable[[int, str], None] | None) -> torch.Tensor:
    """Return the element that all tensors without a key share: making one is work for a device, and for its allocator.

    It stays while the process lives: one element of each dtype on each device, for which an allocator takes 512 bytes.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    least = True if dtype is torch.bool else float("nan") if floating else torch.iinfo(dtype).min
    element = torch.full((), least, dtype=dtype, device=device)
    if refuse is not None:
        refuse(element.untyped_storage()._cdata, _ACCESS.format("a tensor"))
    return element


def shows_reads(dtype: torch.dtype, device: torch.device) -> bool:
    """True if C++ code that reads a hollow tensor of that kind gets its values, an error or NaN: no other number."""
    has_key = _keys is not None and device.type in (*_COMPATIBLE, "meta")  # Of one that is to be made on the CPU.
    return has_key or _refuse_access is not None or dtype.is_floating_point or dtype.is_complex


def answers_for(device: torch.device) -> bool:
    """True if operators that get hollow tensors of `device` are answered, also within `__torch_dispatch__`."""
    return _keys is not None and device.type in _COMPATIBLE


def is_hollow(tensor: torch.Tensor) -> bool:
    """True if `tensor` is hollow, or a view of one that is."""
    return _keys is not None and (torch._C._dispatch_keys(tensor) & _keys).raw_repr() != 0


def operators_unanswered() -> AbstractContextManager[object]:
    """Within it operators work on hollow tensors themselves: those that make views do so."""
    guard: AbstractContextManager[object] = nullcontext() if _keys is None else torch._C._ExcludeDispatchKeyGuard(_keys)
    return guard
