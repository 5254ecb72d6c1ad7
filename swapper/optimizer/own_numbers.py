"""The numbers that an optimizer keeps in attributes of its own, in which it may count its steps.

A class is stepped bucket by bucket, so there it would count buckets. Twins of an optimizer, on which it is tried, have
copies of its attributes, and what they have come to is compared.
"""

from __future__ import annotations

import ast
import copy
import itertools
import numbers
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["numbers_in", "own_copy"]

_DEPTH_MAX = 4
_NUMEL_MAX = 64
_ARRAY_BYTES_MAX = 1 << 20

_KEPT = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.nn.Module, Optimizer, torch.Tensor)
"""Objects that a class may refer to and has not made to count in."""


def own_copy(value: Any, package: str, memo: dict[int, Any], depth: int = _DEPTH_MAX) -> Any:
    """A copy of an attribute: of containers, small tensors and arrays, and objects in it; models, parameters and
    functions are shared.

    Args:
        package: in which the optimizer's class is. Objects of classes of others are shared.
        memo: copies by the ids of what they are of, which has to stay; what is there twice is copied once.
        depth: of containers and objects in one another. What is deeper is shared.
    """
    if id(value) not in memo:
        memo[id(value)] = _copied(value, package, memo, depth)
    return memo[id(value)]


def _copied(value: Any, package: str, memo: dict[int, Any], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        is_number = value.numel() <= _NUMEL_MAX and not isinstance(value, torch.nn.Parameter)
        return value.detach().clone() if is_number else value
    if not depth:
        return value
    if isinstance(value, tuple):
        items = [own_copy(each, package, memo, depth - 1) for each in value]
        make = getattr(type(value), "_make", type(value))  # of a named one
        return make(items) if type(value) is tuple or hasattr(type(value), "_make") else value
    if _is_small_array(value):
        return copy.copy(value)
    if isinstance(value, (dict, list, deque, set, itertools.count)) or _has_attributes(value, package):
        try:
            copied = _copy_of(value) if type(value) is itertools.count else copy.copy(value)
        except Exception:  # It cannot be copied, as a file.
            return value
        memo[id(value)] = copied  # It may be in itself.
        for items in _tables_of(copied, package):
            for key, each in list(items.items()) if isinstance(items, dict) else list(enumerate(items)):
                items[key] = own_copy(each, package, memo, depth - 1)
        return copied
    return value


def numbers_in(value: Any, name: str, package: str, depth: int = _DEPTH_MAX) -> Iterator[tuple[str, Any]]:
    """The numbers, small tensors and arrays in what `own_copy` would copy, each with where it is."""
    is_small_tensor = isinstance(value, torch.Tensor) and value.numel() <= _NUMEL_MAX
    if isinstance(value, numbers.Number) or is_small_tensor or _is_small_array(value):
        yield name, value
    elif isinstance(value, itertools.count):
        yield name, repr(value)
    elif depth:
        tables = [dict(enumerate(value))] if isinstance(value, tuple) else _tables_of(value, package)
        for items in tables:
            for key, each in items.items() if isinstance(items, Mapping) else enumerate(items):
                inside = f".{key}" if _has_attributes(value, package) and items is vars(value) else f"[{key!r}]"
                yield from numbers_in(each, name + inside, package, depth - 1)


def _is_small_array(value: Any) -> bool:
    return hasattr(type(value), "__array_interface__") and value.nbytes <= _ARRAY_BYTES_MAX  # of numpy


def _copy_of(value: itertools.count[Any]) -> itertools.count[Any]:
    """A counter that goes on from there: Python 3.14 copies none."""
    return itertools.count(*ast.literal_eval(f"[{repr(value).removeprefix('count(').removesuffix(')')}]"))


def _tables_of(value: Any, package: str) -> list[Any]:
    tables: list[Any] = [value] if isinstance(value, (dict, list, deque)) else []
    return tables + ([vars(value)] if _has_attributes(value, package) else [])


def _has_attributes(value: Any, package: str) -> bool:
    is_of_package = type(value).__module__.split(".")[0] == package
    return is_of_package and hasattr(value, "__dict__") and not isinstance(value, _KEPT)
