"""Rows of what is made of tensors of files: made of fewer of them, by the same operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from swapper.files.packed_tensors import Unpacking
from swapper.files.tensor_files import StoredTensor
from swapper.files.unread import Recipe, RowWise, Step

__all__ = ["rows_of"]

_ATEN = torch.ops.aten
_ELEMENTWISE = {
    _ATEN._to_copy.default, _ATEN.clone.default, _ATEN.contiguous.default, _ATEN.detach.default, _ATEN.alias.default,
}  # fmt: skip


def rows_of(recipe: Recipe, start: int, stop: int) -> Recipe | None:
    """Give how the rows from `start` to `stop` of the first dimension are made; None where it is not known.

    Whether it is known does not depend on which rows they are, if it is known for all.
    """
    if isinstance(recipe, StoredTensor):
        return recipe.rows(start, stop) if recipe.shape else None
    args = _rows_of_arguments(recipe, start, stop)
    if args is None:
        return None
    shape = torch.Size((stop - start, *recipe.shape[1:]))
    operator = recipe.operator
    if isinstance(operator, RowWise):
        operator = replace(operator, units=stop - start)
    elif isinstance(operator, Unpacking):
        operator = operator.of_rows(start, stop)
    return Step(operator, args, recipe.kwargs, shape, recipe.dtype)


def _rows_of_arguments(step: Step, start: int, stop: int) -> tuple[Any, ...] | None:
    func, args = step.operator, step.args
    if step.item is not None or not args:
        return None
    if isinstance(func, Unpacking):
        return tuple(args[start:stop]) if func.rows == 1 else None
    if isinstance(func, RowWise):
        if func.units != step.shape[0]:
            return None
        several = [rows_of(each, start, stop) if func.cuts(each) else each for each in args]
        return None if None in several else tuple(several)
    if func in (_ATEN.stack.default, _ATEN.cat.default):
        dim = args[1] if len(args) > 1 else step.kwargs.get("dim", 0)
        parts: list[Recipe | None]
        if dim % len(step.shape):
            parts = [rows_of(part, start, stop) for part in args[0]]
        elif func is _ATEN.stack.default:
            parts = list(args[0][start:stop])
        else:
            parts, at = [], 0
            for part in args[0]:
                first, last = max(start - at, 0), min(stop - at, part.shape[0])
                if first < last:
                    parts.append(rows_of(part, first, last))
                at += part.shape[0]
        return None if None in parts else (parts, *args[1:])
    if func is _ATEN.transpose.int:
        known = all(dim % len(step.shape) for dim in args[1:3])
    else:
        known = func in _ELEMENTWISE
    rows = rows_of(args[0], start, stop) if known else None
    return None if rows is None else (rows, *args[1:])
