"""What to do about values that cannot be saved without pickle, in words."""

from __future__ import annotations

import dataclasses
import enum
import os
import types
from collections import deque

import torch

__all__ = ["advice_on", "advice_on_tensor", "name_of"]


def name_of(kind: type) -> str:
    """What users call a class."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def advice_on_tensor(tensor: torch.Tensor) -> str:
    """What to do about a tensor that cannot be saved; "" if it can."""
    if type(tensor) is not torch.Tensor:
        return "make it a plain tensor first"
    if tensor.is_nested:
        return "it is a nested tensor: save `x.unbind()`"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: save `x.to_dense()`, or its parts on their own"
    if tensor.is_quantized:
        return "it is quantised: save `x.int_repr()`, its scale and its zero point"
    if tensor.is_meta:
        return "it is on the meta device, where it has no values"
    return ""


def advice_on(value: object) -> str:
    """What to do about a value that cannot be saved."""
    kind = type(value)
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return "it is code: leave it out, or save its name as a string and look it up after loading"
    if isinstance(value, enum.Enum):
        return "it is no member by a name, or its class is not found by its own: save its `name` or its `value`"
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "save `x._asdict()` or `tuple(x)`"
    for method in ("state_dict", "get_state", "getstate"):
        if hasattr(kind, method):
            return f"save `x.{method}()`"
    if hasattr(kind, "bit_generator"):
        return "save `x.bit_generator.state`"
    if dataclasses.is_dataclass(value):
        return "save `dataclasses.asdict(x)`"
    if isinstance(value, os.PathLike):
        return "save `str(x)`"
    bases = (dict, list, tuple, set, frozenset, deque, str, bytes, bytearray, int, float, complex)
    if plain := next((base.__name__ for base in bases if isinstance(value, base)), None):
        return f"save `{plain}(x)`"
    return "save what it is made from: numbers, strings, lists, dictionaries, tensors"
