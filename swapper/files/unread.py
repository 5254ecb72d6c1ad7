"""`Unread`: tensors of files that code of others converts before they are read.

A library that loads a model reads each tensor of a file, casts, stacks or splits it, and makes a parameter of the
result. Given `Unread` tensors it does the same, and no byte is read: what has become of them says, by its `recipe`,
from which tensors of files it is made, and by which operators. Only where the library needs a value (a comparison of
two tensors, for example) are the tensors read that it depends on.

[Note: views] What is changed in place is changed for all views of it. So a view has no recipe of its own, but that of
its base and what it is of that; and a change of a view is one more step in the recipe of the base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from swapper.errors import SwapError
from swapper.files.tensor_files import StoredTensor, TensorReader

__all__ = [
    "InPlaceOperator",
    "Recipe",
    "RowWise",
    "Step",
    "Unread",
    "evaluate",
    "read_now",
    "sources_of",
    "write_values",
]

_ATEN = torch.ops.aten
_SAME = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default}
_EMPTY = {_ATEN.empty_like.default, _ATEN.new_empty.default, _ATEN.new_empty_strided.default}


@dataclass(frozen=True, eq=False)
class Step:
    """The result of an operator on tensors that are not read.

    Attributes:
        operator: of torch's dispatcher; does not change its arguments.
        args, kwargs: with recipes in place of tensors that are not read.
        shape, dtype: of the result.
        item: which of several results; None if there is one.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size
    dtype: torch.dtype
    item: int | None = None

    @property
    def joined_dim(self) -> int:
        """The dimension, as it was given, along which `stack` or `cat` joins."""
        dim: int = self.args[1] if len(self.args) > 1 else self.kwargs.get("dim", 0)
        return dim


class InPlaceOperator:
    """An operator of a `Step` that can make its result in memory that it is given."""

    def write(self, into: torch.Tensor, args: Sequence[torch.Tensor]) -> None:
        """Make what it makes of `args` in `into`, of that shape, cast to its dtype."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RowWise(InPlaceOperator):
    """An operator that makes rows of its result, the first dimension, of as many of its arguments.

    Attributes:
        function: that it calls.
        units: into how many equal parts the rows of the result can be cut; so can those of each argument, and a part is
            made of one of each. An argument whose rows cannot be cut so is needed whole for each part.
    """

    function: Callable[..., torch.Tensor]
    units: int

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        """Make all rows."""
        return self.function(*args)

    def write(self, into: torch.Tensor, args: Sequence[torch.Tensor]) -> None:
        """Make them in `into`, some at a time: what the function needs besides does not grow with the tensor."""
        at_once = max(_AT_ONCE_BYTES * self.units // max(into.nbytes, 1), 1)
        count = -(-self.units // at_once)
        cuts = [
            torch.split(each, each.shape[0] // self.units * at_once) if self.cuts(each) else [each] * count
            for each in (into, *args)
        ]
        for place, *parts in zip(*cuts, strict=True):
            place.copy_(self.function(*parts))

    def cuts(self, argument: torch.Tensor | Recipe) -> bool:
        """Return True unless `argument` is needed whole."""
        return bool(argument.shape) and argument.shape[0] % self.units == 0


_AT_ONCE_BYTES = 1 << 20


Recipe = StoredTensor | Step
"""A tensor in a file, or what is made of some."""


def sources_of(recipe: Recipe) -> Iterator[StoredTensor]:
    """Yield the tensors in files that `recipe` is made of."""
    if isinstance(recipe, StoredTensor):
        yield recipe
        return
    for item in tree_iter((recipe.args, recipe.kwargs), is_leaf=_is_recipe):
        if _is_recipe(item):
            yield from sources_of(item)


def evaluate(recipe: Recipe, read: Callable[[StoredTensor], torch.Tensor]) -> torch.Tensor:
    """Make the values of `recipe`. May be a view of what `read` gives."""
    if isinstance(recipe, StoredTensor):
        return read(recipe)
    args, kwargs = tree_map(
        lambda item: evaluate(item, read) if _is_recipe(item) else item,
        (recipe.args, recipe.kwargs),
        is_leaf=_is_recipe,
    )
    result: Any = recipe.operator(*args, **kwargs)
    made: torch.Tensor = result if recipe.item is None else result[recipe.item]
    return made


def write_values(recipe: Recipe, into: torch.Tensor, read: Callable[[StoredTensor], torch.Tensor]) -> None:
    """Make the values of `recipe` in `into`, of its shape and dtype, if possible without memory besides.

    What is stacked, joined or transposed is written part by part to where it belongs, and cast as it is written.
    Casting commutes with these; of two casts in a row the first is done in memory of its own.
    """
    if isinstance(recipe, Step):
        func, args = recipe.operator, recipe.args
        if func in (_ATEN.stack.default, _ATEN.cat.default):
            parts = _parts(into, recipe.joined_dim, args[0], stacked=func is _ATEN.stack.default)
            if parts is not None:
                for part, place in zip(args[0], parts, strict=True):
                    write_values(part, place, read)
                return
        elif func is _ATEN.transpose.int or func is _ATEN.t.default:
            write_values(args[0], into.transpose(*args[1:]) if len(args) > 1 else into.t(), read)
            return
        elif func is _ATEN.clone.default or (func is _ATEN._to_copy.default and recipe.dtype == into.dtype):
            write_values(args[0], into, read)
            return
        elif isinstance(func, InPlaceOperator):
            func.write(into, [evaluate(each, read) for each in args])
            return
    into.copy_(evaluate(recipe, read))


def _parts(into: torch.Tensor, dim: int, args: Sequence[Any], *, stacked: bool) -> Sequence[torch.Tensor] | None:
    """The places in `into` of what is stacked or joined; None if an old rule of `torch.cat` applies."""
    if stacked:
        return into.unbind(dim)
    if any(len(each.shape) != into.dim() for each in args):
        return None
    return torch.split(into, [each.shape[dim] for each in args], dim)


class Unread(torch.Tensor):
    """A tensor on the CPU, as far as can be seen from its attributes, whose values are in files.

    Args:
        recipe: what it is.
        like: has its shape, strides and dtype; on the meta device.

    Attributes:
        like: as given.
        view_of: the tensor that it is a view of, and how, unless it is one of its own. See [Note: views].
    """

    like: torch.Tensor
    view_of: tuple[Unread, Step | None] | None
    _recipe: Recipe
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, recipe: Recipe, like: torch.Tensor) -> Unread:  # noqa: D102
        made: Unread = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made._recipe, made.like, made.view_of = recipe, like, None
        return made

    def __init__(self, recipe: Recipe, like: torch.Tensor) -> None:
        super().__init__()

    @classmethod
    def of_file(cls, stored: Recipe) -> Unread:
        """Stand for a tensor of a file, or what is made of some."""
        return cls(stored, torch.empty(stored.shape, dtype=stored.dtype, device="meta"))

    @property
    def recipe(self) -> Recipe:
        """The recipe of the values as they are now."""
        if self.view_of is None:
            return self._recipe
        base, step = self.view_of
        return base.recipe if step is None else replace(step, args=(base.recipe, *step.args[1:]))

    def change(self, func: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have `func(self, *rest, **kwargs)`, which changes it in place, done whenever its values are needed."""
        base: Unread = self
        views: list[Step] = []
        while base.view_of is not None:
            base, step = base.view_of
            if step is not None:
                views.insert(0, step)
        changed = functools.partial(_with_change, views, func)
        rest, kwargs = tree_map(_recipe, (rest, kwargs))
        base._recipe = Step(changed, (base._recipe, *rest), kwargs, base.shape, base.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Unread({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SAME:
            same = cls(args[0].recipe, args[0].like)
            same.view_of = args[0], None
            return same
        if func._schema.is_mutable:
            return _change(func, args, kwargs)
        if func in _EMPTY:
            kwargs.setdefault("device", "cpu")
            return func(*tree_map(_like, args), **tree_map(_like, kwargs))
        if not all("Tensor" in str(result.type) for result in func._schema.returns):
            return _read_now(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise SwapError(f"{func} copies a weight to {device} while the model is loaded; load it on the CPU")
        try:
            on_meta = {**kwargs, "device": "meta"} if device is not None else kwargs
            likes = func(*tree_map(_like, args), **tree_map(_like, on_meta))
        except NotImplementedError:  # The shape of the result depends on the values.
            return _read_now(func, args, kwargs)
        base = args[0] if func.is_view else None
        args, kwargs = tree_map(_recipe, (args, kwargs))
        several = [likes] if isinstance(likes, torch.Tensor) else list(likes)
        made = []
        for i, like in enumerate(several):
            step = Step(func, args, kwargs, like.shape, like.dtype, None if several[0] is likes else i)
            made.append(cls(step, like))
            made[-1].view_of = None if base is None else (base, step)
        return made[0] if several[0] is likes else type(likes)(made)


def read_now(tensor: torch.Tensor) -> torch.Tensor:
    """Read the values of `tensor`, if it is `Unread`.

    Raises:
        SwapIOError: a file could not be read.
    """
    values: torch.Tensor = _read_now(torch.clone, (tensor,), {})
    return values


def _is_recipe(item: object) -> bool:
    return isinstance(item, (StoredTensor, Step))


def _like(item: Any) -> Any:
    if isinstance(item, Unread):
        return item.like
    return item.to("meta") if isinstance(item, torch.Tensor) else item


def _recipe(item: Any) -> Any:
    return item.recipe if isinstance(item, Unread) else item


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what changes a tensor in place."""
    target = args[0] if args else None
    if not isinstance(target, Unread):
        return _read_now(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags and target.view_of is None and isinstance(target.recipe, Step):
        # It was computed for this, and the random numbers are to be drawn now.
        values = _read_now(torch.clone, (target,), {})
        _read_now(func, (values, *args[1:]), kwargs)
        target._recipe = Step(_as_it_is, (values,), {}, target.shape, target.dtype)
    elif {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}.intersection(func.tags):
        raise SwapError(
            f"{func} changes a weight while the model is loaded, and its values stay in the file; load the model in "
            "memory, or with swapper.init"
        )
    else:
        target.change(func, args[1:], kwargs)
    return target


def _with_change(
    views: Sequence[Step], func: Callable[..., Any], base: torch.Tensor, *rest: Any, **kwargs: Any
) -> torch.Tensor:
    """A copy of `base` of which the last of `views` is changed by `func`."""
    base = view = base.clone()
    for step in views:
        view = step.operator(view, *step.args[1:], **step.kwargs)
        view = view if step.item is None else view[step.item]
    func(view, *rest, **kwargs)
    return base


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


def _read_now(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with closing(TensorReader()) as reader:
        args, kwargs = tree_map(
            lambda item: evaluate(item.recipe, reader.read) if isinstance(item, Unread) else item, (args, kwargs)
        )
        return func(*args, **kwargs)
