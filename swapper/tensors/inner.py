"""The tensors that hold the bytes of a parameter or a buffer, which may be of a class that is made of others.

Two kinds of classes are known, as those of quantised weights are:

- Wrappers, of `__tensor_flatten__` and `__tensor_unflatten__` (torchao, optimum-quanto). They have no memory of their
  own, and the tensors inside have it. The wrapper stays the object that it is, with the same tensors inside: these are
  swapped one by one.
- Parameters of bitsandbytes. They have memory, as any parameter, and tensors beside it that say what the bytes mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swapper.tensors.attributes import HOME
from swapper.tensors.sharded import is_sharded

__all__ = ["Inner", "awaits_codes", "has_own_class", "inner_tensors", "is_wrapper", "made_of"]


class Inner(NamedTuple):
    """A tensor that has bytes.

    Attributes:
        name: in a model's flat state dict: that of the tensor which it is inside of, and where it is there.
        tensor: with memory, or evicted.
        aliases: other tensors that are to have the same values, in the same memory.
    """

    name: str
    tensor: torch.Tensor
    aliases: tuple[torch.Tensor, ...] = ()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True if `tensor` has no memory of its own, and says which tensors inside have."""
    return is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)


def has_own_class(tensor: torch.Tensor) -> bool:
    """True for a parameter that has memory, and a class by which others know what is in it."""
    return type(tensor).__module__.startswith("bitsandbytes.") and type(tensor).__name__ in _OF_BITSANDBYTES


def awaits_codes(tensor: torch.Tensor) -> bool:
    """True for a parameter of bitsandbytes that is quantised when it is moved, or used first, and was not yet."""
    if not has_own_class(tensor):
        return False
    if type(tensor).__name__ == "Params4bit":
        return vars(tensor).get("quant_state") is None
    return tensor.dtype != torch.int8 and not vars(tensor).get("has_fp16_weights")


_OF_BITSANDBYTES = ("Params4bit", "Int8Params")


def inner_tensors(name: str, tensor: torch.Tensor, module: torch.nn.Module | None = None) -> Iterator[Inner]:
    """Yield what `tensor` is made of: itself, or the tensors inside, or both. Those that share memory, too.

    Args:
        name: of `tensor` in the model's state dict.
        module: that has it, which may also have tensors that belong to it.
    """
    if is_wrapper(tensor):
        prefix, dot, own = name.rpartition(".")
        # As in the files that torchao writes.
        for path, each in _inside(tensor):
            yield Inner(f"{prefix}{dot}_{own}_{path}", each)
    elif not has_own_class(tensor):
        yield Inner(name, tensor)
    elif type(tensor).__name__ == "Params4bit":
        yield Inner(name, tensor)
        for key, each in _of_quant_state(vars(tensor).get("quant_state")):
            yield Inner(f"{name}.{key}", each)
    else:
        state = getattr(module, "state", None)
        places = (vars(tensor), {} if state is None else vars(state))
        codes = [place["CB"] for place in places if isinstance(place.get("CB"), torch.Tensor)]
        same = [c for c in dict.fromkeys(codes) if c is not tensor and _same_memory(c, tensor)]
        yield Inner(name, tensor, tuple(same))
        for scale in dict.fromkeys(p["SCB"] for p in places if isinstance(p.get("SCB"), torch.Tensor)):
            yield Inner(f"{name.rpartition('.')[0]}.SCB".lstrip("."), scale)


def made_of(tensor: torch.Tensor) -> str:
    """Say how `tensor` is made of others, as far as that is not in their values. "" of an ordinary one."""
    text = ""
    if is_wrapper(tensor):
        text = repr(tensor.__tensor_flatten__()[1])  # type: ignore[attr-defined]
    elif (state := vars(tensor).get("quant_state")) is not None and has_own_class(tensor):
        known = ("quant_type", "blocksize", "shape", "dtype", "nested")
        text = ", ".join(f"{key}={getattr(state, key, None)}" for key in known)
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(tensor).__name__}: {text}") if text else ""


def _inside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for key in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        each = getattr(tensor, key)
        if is_wrapper(each):
            yield from ((f"{key}_{path}", innermost) for path, innermost in _inside(each))
        else:
            yield key, each


def _of_quant_state(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if state is None:
        return
    nested = getattr(state, "state2", None)
    for key, each in (
        ("absmax", getattr(state, "absmax", None)),
        ("quant_map", getattr(state, "code", None)),
        ("nested_absmax", getattr(nested, "absmax", None)),
        ("nested_quant_map", getattr(nested, "code", None)),
        ("nested_offset", getattr(state, "offset", None)),
    ):
        if isinstance(each, torch.Tensor):
            yield key, each


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    homes = [vars(each).get(HOME) for each in (one, other)]
    if homes == [None, None]:
        return one.data_ptr() == other.data_ptr()
    # A swapped one is asked for no address: that would be one of a copy.
    first, second = ((home.owner, home.name) if home is not None else None for home in homes)
    return first == second
