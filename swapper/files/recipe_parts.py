"""Parts of what is made of tensors of files: pieces of files that are its bytes, packed parts, rows.

Stacking matrices of experts, joining some of them, splitting one: such conversions only say in which order bytes of
files lie in memory. They need not be computed if the bytes are read to where they belong. And rows of a tensor are made
of fewer rows of others, by the same operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from swapper.files.packed_tensors import Unpacking
from swapper.files.tensor_files import StoredTensor
from swapper.files.unread import Recipe, RowWise, Step

__all__ = ["PackedPart", "moved_by", "packed_parts_of", "pieces_of", "rows_of"]

_ATEN = torch.ops.aten

# --- Pieces of files -------------------------------------------------------------------------------------------------

_MOST = 4096
"""Pieces of a tensor. With more of them a read is no longer one of a few long spans."""

_RESHAPES = {
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default,
    _ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.clone.default, _ATEN.contiguous.default,
    _ATEN.flatten.using_ints, _ATEN._reshape_alias.default,
}  # fmt: skip
"""These keep the elements in their order."""
_NARROWS = {
    _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unbind.int, _ATEN.slice.Tensor, _ATEN.select.int,
}  # fmt: skip
"""These select along one dimension."""
_MOVES = _RESHAPES | _NARROWS | {
    _ATEN.stack.default, _ATEN.cat.default, _ATEN.transpose.int, _ATEN.t.default, _ATEN.permute.default,
    _ATEN._to_copy.default,
}  # fmt: skip
"""These give elements of their arguments, in another order or dtype."""


def moved_by(recipe: Recipe) -> Iterator[StoredTensor]:
    """Yield the tensors in files that give `recipe` its elements as they are, or cast: nothing is computed of them."""
    if isinstance(recipe, StoredTensor):
        yield recipe
    elif recipe.operator in _MOVES:
        for item in tree_iter(recipe.args, is_leaf=lambda item: isinstance(item, Recipe)):
            if isinstance(item, Recipe):
                yield from moved_by(item)


@dataclass(frozen=True)
class _Bytes:
    """A tensor whose elements are, in the order of indices, bytes of files."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: Sequence[StoredTensor]

    def part(self, start: int, stop: int) -> list[StoredTensor]:
        """Bytes from `start` to `stop`."""
        found, cursor = [], 0
        for piece in self.pieces:
            first, last = max(start, cursor), min(stop, cursor + piece.length_bytes)
            if first < last:
                found.append(_slice(piece, first - cursor, last - cursor))
            cursor += piece.length_bytes
        return found

    def narrow(self, shape: torch.Size, dim: int, start: int) -> _Bytes | None:
        """As `torch.narrow`, to `shape`."""
        inner = math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize
        outer = math.prod(self.shape[:dim])
        if outer > _MOST:
            return None
        row, kept = self.shape[dim] * inner, shape[dim] * inner
        parts = [self.part(i * row + start * inner, i * row + start * inner + kept) for i in range(outer)]
        return _Bytes(shape, self.dtype, list(itertools.chain(*parts)))


def pieces_of(recipe: Recipe, tensor: torch.Tensor) -> tuple[StoredTensor, ...] | None:
    """Give the parts of tensors in files whose bytes, one after another, are those of `tensor`.

    Args:
        recipe: how it is made.
        tensor: has its shape, strides and dtype.

    Returns:
        None if it is made in another way, or if its elements lie in memory in another order than that of indices.
    """
    if isinstance(recipe, StoredTensor):
        return (recipe,)
    found = _find(recipe)
    if found is None or not tensor.is_contiguous() or len(found.pieces) > _MOST or not found.pieces:
        return None
    if found.shape.numel() != tensor.numel() or found.dtype != tensor.dtype:
        return None
    return tuple(found.pieces)


def _find(recipe: Any) -> _Bytes | None:
    if isinstance(recipe, StoredTensor):
        return _Bytes(recipe.shape, recipe.dtype, [recipe])
    if not isinstance(recipe, Step):
        return None
    func, args = recipe.operator, recipe.args
    if func in (_ATEN.stack.default, _ATEN.cat.default):
        parts = [_find(each) for each in args[0]]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len({part.dtype for part in known}) > 1:
            return None
        join = _stack if func is _ATEN.stack.default else _cat
        return join(known, recipe.joined_dim)
    of = _find(args[0]) if args else None
    if of is None:
        return None
    if func in _RESHAPES:
        shape = func(torch.empty(of.shape, device="meta"), *args[1:], **recipe.kwargs).shape
        return _Bytes(shape, of.dtype, of.pieces)
    return _narrow(of, recipe) if func in _NARROWS else None


def _narrow(of: _Bytes, recipe: Step) -> _Bytes | None:
    """The part of `of` that an operator selects along one dimension."""
    # The offsets of the result in one of the same strides say which part it is.
    like = torch.empty(of.shape, device="meta")
    result: Any = recipe.operator(like, *recipe.args[1:], **recipe.kwargs)
    result = result if recipe.item is None else result[recipe.item]
    func, args = recipe.operator, recipe.args
    position = 2 if func in (_ATEN.split.Tensor, _ATEN.split_with_sizes.default) else 1
    dim = args[position] if len(args) > position else recipe.kwargs.get("dim", 0)
    dim %= max(len(of.shape), 1)
    if func is _ATEN.slice.Tensor and len(args) > 4 and args[4] != 1:
        return None
    start = result.storage_offset() // max(like.stride(dim), 1)
    size = 1 if func in (_ATEN.select.int, _ATEN.unbind.int) else result.shape[dim]
    found = of.narrow(torch.Size((*of.shape[:dim], size, *of.shape[dim + 1 :])), dim, start)
    return None if found is None else _Bytes(result.shape, of.dtype, found.pieces)


def _stack(parts: Sequence[_Bytes], dim: int) -> _Bytes | None:
    dim %= len(parts[0].shape) + 1
    shape = parts[0].shape
    longer = torch.Size((*shape[:dim], 1, *shape[dim:]))
    return _cat([_Bytes(longer, part.dtype, part.pieces) for part in parts], dim)


def _cat(parts: Sequence[_Bytes], dim: int) -> _Bytes | None:
    dim %= max(len(parts[0].shape), 1)
    shape = parts[0].shape
    if any(len(part.shape) != len(shape) for part in parts):
        return None
    outer = math.prod(shape[:dim])
    if outer * len(parts) > _MOST:
        return None
    pieces: list[StoredTensor] = []
    for i in range(outer):
        for part in parts:
            row = math.prod(part.shape[dim:]) * part.dtype.itemsize
            pieces += part.part(i * row, (i + 1) * row)
    size = sum(part.shape[dim] for part in parts)
    return _Bytes(torch.Size((*shape[:dim], size, *shape[dim + 1 :])), parts[0].dtype, pieces)


def _slice(piece: StoredTensor, start_bytes: int, stop_bytes: int) -> StoredTensor:
    if (start_bytes, stop_bytes) == (0, piece.length_bytes):
        return piece
    shape = torch.Size(((stop_bytes - start_bytes) // piece.dtype.itemsize,))
    start = piece.start_bytes
    return replace(piece, shape=shape, start_bytes=start + start_bytes, stop_bytes=start + stop_bytes)


class PackedPart(NamedTuple):
    """A part of a packed tensor, and how many values it has."""

    stored: StoredTensor
    numel: int


def packed_parts_of(recipe: Recipe) -> list[PackedPart] | None:
    """The packed parts that, unpacked one after another, are the tensor that `recipe` makes; None if it is another."""
    if not isinstance(recipe, Step):
        return None
    func, args = recipe.operator, recipe.args
    if isinstance(func, Unpacking):
        row = func.shape.numel() // func.shape[0]
        starts = range(0, func.shape[0], func.rows)
        counts = [row * min(func.rows, func.shape[0] - start) for start in starts]
        return [PackedPart(stored, numel) for stored, numel in zip(args, counts, strict=True)]
    if func in (_ATEN.stack.default, _ATEN.cat.default):
        if recipe.joined_dim:
            return None
        found = [packed_parts_of(each) for each in args[0]]
        known = [parts for parts in found if parts is not None]
        return [part for parts in known for part in parts] if len(known) == len(found) else None
    return None


# --- Rows ------------------------------------------------------------------------------------------------------------

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
        parts: list[Recipe | None]
        if step.joined_dim % len(step.shape):
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
