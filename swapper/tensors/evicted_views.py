"""Tensors of state dicts whose parameters are evicted; and `run`, which runs a function where values are missing.

[Note: parts] A part of a tensor of a state dict is its shape, strides and offset in that tensor: of a function that
makes views nothing is kept, neither its arguments, which their owner may change, nor who called it, whose variables
would live as long as the part. It is called once, on a tensor without memory, however many views it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_iter, tree_map_only

from swapper.errors import SwapError
from swapper.tensors.attributes import UNFILLED
from swapper.tensors.collectives import is_collective, run_collective, watch_lists
from swapper.tensors.evicted_gradients import EvictedGradient
from swapper.tensors.homes import LAYOUT, METADATA, Call, Home, StandIn, home_of, present
from swapper.tensors.packed_codes import is_packed
from swapper.tensors.strides import spanned_bytes

__all__ = [
    "KEEPS_A_MODEL",
    "MAKES_ALIASES",
    "MAKES_PARAMETERS",
    "MAKES_STATE_DICTS",
    "EvictedView",
    "PartOfView",
    "Source",
    "ViewOfParameter",
    "as_in_state_dict",
    "one_by_one",
    "parts_of",
    "run",
    "viewed_by",
]

MAKES_PARAMETERS = Parameter.__new__.__code__
MAKES_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
MAKES_STATE_DICTS = Module._save_to_state_dict.__code__
KEEPS_A_MODEL = AveragedModel.update_parameters.__code__
"""It has all parameters of a model in a list at once."""


class Source:
    """Gives an `EvictedView` its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device = torch.device("cpu")
    own: torch.Tensor | None = None
    """The tensor that replaces values that are read anew each time, after it was written to; it stays in memory."""

    def homes(self) -> Sequence[Home]:
        """The homes whose values must be in memory for `real`. None here: it is read."""
        return ()

    def real(self) -> torch.Tensor:
        """The tensor itself."""
        raise NotImplementedError

    def written(self, values: torch.Tensor) -> None:
        """Take note that the tensor from `real` was written to, so that it is not read again."""
        self.own = values

    def mapped_copy(self) -> torch.Tensor:
        """The values at an address of the host that stays theirs as long as somebody has the tensor."""
        return self.real()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: whoever copies what a view has, as `dcp.async_save` does, has copied its values."""


class ViewOfParameter(Source):
    """The values of a parameter, evicted or not."""

    def __init__(self, parameter: torch.Tensor, home: Home) -> None:
        self.shape, self.stride, self.dtype = parameter.shape, home.stride, parameter.dtype
        self.device = parameter.device
        self.parameter = parameter
        self._was_packed = is_packed(parameter)
        self._name = home.name
        self._keeper = home.keeper
        self._copy: torch.Tensor | None = None

    def homes(self) -> Sequence[Home]:
        """The home of the parameter, if it is still swapped."""
        home = home_of(self.parameter)
        return () if home is None else (home,)

    def real(self) -> torch.Tensor:
        """As ordinary state dicts have it.

        Raises:
            SwapError: its memory and the drive no longer have the values of then, as it was given data of another shape
                or dtype, or its codes in another order: see [Note: packed codes].
        """
        self._check()
        return self.parameter.detach()

    def written(self, values: torch.Tensor) -> None:
        """Nothing is to be done: it is the parameter's own memory."""

    def _check(self) -> None:
        now, packed = self.parameter, is_packed(self.parameter)
        if (now.shape, now.dtype, packed) != (self.shape, self.dtype, self._was_packed):
            how = "" if packed == self._was_packed else ", as bitsandbytes does when it packs codes or puts them back"
            raise SwapError(
                f"a state dict has {self._name} of {tuple(self.shape)} x {self.dtype} that was given other data since, "
                f"{tuple(now.shape)} x {now.dtype}{how}; call state_dict again, or keep clones of what it gave before"
            )

    def mapped_copy(self) -> torch.Tensor:
        """A copy that is the same for all views of the parameter, and is kept. Raises SwapError as `real`."""
        self._check()
        home = home_of(self.parameter)
        self._copy = self.parameter.detach() if home is None else home.mapped_copy()
        return self._copy


class PartOfView(Source):
    """A view of a tensor of a state dict, as one of `_MAKES_VIEWS` gives it. See [Note: parts]."""

    def __init__(self, whole: Source, like: torch.Tensor) -> None:
        """Make the part of `whole` that begins and ends in its memory as `like` does in that of `like_of(whole)`."""
        self.whole: Source = whole.whole if isinstance(whole, PartOfView) else whole
        self.shape, self.stride, self.dtype = like.shape, like.stride(), like.dtype
        self.device = self.whole.device
        self._offset = like.storage_offset()

    def homes(self) -> Sequence[Home]:
        """The homes of the whole."""
        return self.whole.homes()

    def real(self) -> torch.Tensor:
        """A view of the whole."""
        return self.of(self.whole.real())

    def mapped_copy(self) -> torch.Tensor:
        """A view of the copy of the whole: a part begins and ends in it as in the whole."""
        return self.of(self.whole.mapped_copy())

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """A view of `values`, those of the whole.

        Raises:
            SwapError: they have another shape, dtype or strides than the whole had.
        """
        whole = self.whole
        strides = zip(values.shape, values.stride(), whole.stride, strict=False)
        if (values.shape, values.dtype) != (whole.shape, whole.dtype) or (
            values.numel() and any(now != then for size, now, then in strides if size > 1)
        ):
            raise SwapError(
                f"a part of a state dict's tensor of {tuple(whole.shape)} x {whole.dtype} with strides {whole.stride} "
                f"is used, and that was given other data since: {tuple(values.shape)} x {values.dtype} with strides "
                f"{values.stride()}; call state_dict again, or keep clones of what it gave before"
            )
        return values.as_strided(self.shape, self.stride, values.storage_offset() + self._offset)


def like_of(source: Source) -> torch.Tensor:
    """A tensor without memory of the shape, strides and dtype of `source`; of a part, a view of one like its whole."""
    if isinstance(source, PartOfView):
        return source.of(like_of(source.whole))
    return torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device="meta")


def parts_of(source: Source, of: Callable[[torch.Tensor], Any]) -> Any:
    """Return the views that the function `of` makes of the values of `source`: one, or several. See [Note: parts].

    Returns:
        None if it makes anything else than views of the same dtype. `source` if it gives its argument back.
    """
    like = like_of(source)
    result = of(like)
    if result is like:
        return source
    several = isinstance(result, (list, tuple))
    memory = like.untyped_storage()._cdata
    for each in result if several else (result,):
        if each.untyped_storage()._cdata != memory or each.dtype != like.dtype or each.is_conj() or each.is_neg():
            return None
    if several:
        return type(result)(PartOfView(source, each) for each in result)
    return PartOfView(source, result)


class EvictedView(StandIn):
    """The tensor of an evicted parameter in a state dict: it shares the parameter's memory whenever that has values.

    So it reads as the parameter is at that time, what is written to it is the parameter's, and until it is used it
    costs nothing. Only its address, and what is saved of it, are those of a copy in a mapped file.
    """

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> EvictedView:
        """Make one of `source`. It has no memory: what C++ code does with it comes back as a dispatch."""
        view: EvictedView = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride, dtype=source.dtype, device=source.device
        )
        view.source = source
        return view

    @classmethod
    def use(cls, call: Call) -> Any:
        """Run `call`, with the values in memory unless it only asks for metadata."""
        name, args, first = call.name, call.args, call.first
        if name.startswith("_foreach_") and (results := one_by_one(call)) is not NotImplemented:
            return results
        if not isinstance(first, EvictedView):
            return run(call.func, args, call.kwargs)
        if name in _STATEFUL:
            wanted = args[1] if len(args) > 1 else call.kwargs.get("requires_grad", True)
            if name in ("requires_grad_", "__set__ requires_grad") and not wanted:
                return first  # It does not already.
            raise SwapError(
                f"{name.split()[-1]} of a tensor of a state dict whose parameters are swapped: "
                "make it a copy first (clone)"
            )
        if name in ("detach", "__get__ data"):
            if call.caller.f_code is MAKES_PARAMETERS:
                raise SwapError(
                    "a parameter cannot be made of a tensor of a state dict whose parameters are swapped; "
                    "make it a copy first (clone)"
                )
            return EvictedView(first.source)
        if call.func in MAKES_ALIASES or (
            name == "view_as" and len(args) == 2 and args[1] is first
        ):  # As `DTensor.to_local` does.
            return EvictedView(first.source)
        if name in _ADDRESSES:
            parameter = _parameter_of(first.source)
            mark = None if parameter is None else vars(parameter).get(UNFILLED)
            if mark is not None and call.is_saving():
                mark.refuse(parameter)
            return call._replace(args=(first.source.mapped_copy(), *args[1:])).plainly()
        if name in METADATA or name in LAYOUT:
            return call.plainly()
        if name == "__iter__":
            return iter(first.unbind(0))
        if name == "to" and not call.kwargs and {*args[1:]} <= {first.dtype, first.device, str(first.device)}:
            return first
        if name in _MAKES_VIEWS and (views := _views(call, first)) is not None:
            return views
        return run(call.func, args, call.kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, called by C++ code, with the values in memory."""
        if func in MAKES_ALIASES and isinstance(view := args[0], EvictedView):
            return EvictedView(view.source)
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        of = id(self.source.parameter if isinstance(self.source, ViewOfParameter) else self.source)
        copy: torch.Tensor | None = memo.get(("values", of))
        if copy is None:
            copy = memo["values", of] = self.clone(memory_format=torch.preserve_format)
            return copy
        return copy.detach()  # Tied parameters stay so.


_STATEFUL = frozenset(
    {
        "requires_grad_", "__set__ requires_grad", "__set__ grad", "__set__ data", "set_", "resize_", "resize_as_",
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "share_memory_", "t_", "transpose_",
        "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "rename_", "__set__ names", "detach_",
        "__set__ _backward_hooks", "__set__ _post_accumulate_grad_hooks", "__set__ _grad",
    }
)  # fmt: skip
"""Functions that would change a view itself, and not the values."""

_ADDRESSES = frozenset(
    {"data_ptr", "untyped_storage", "storage", "_typed_storage", "__reduce_ex__", "_reduce_ex_internal"}
)
"""Functions that give away the address of the values, for use at any later time."""


_MAKES_VIEWS = frozenset(
    {
        "__getitem__", "__get__ H", "__get__ T", "__get__ mH", "__get__ mT", "adjoint", "as_strided", "broadcast_to",
        "chunk", "contiguous", "diagonal", "dsplit", "expand", "expand_as", "flatten", "hsplit", "moveaxis", "movedim",
        "narrow", "permute", "ravel", "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze",
        "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view",
        "view_as", "vsplit",
    }
)  # fmt: skip
"""Functions whose results are views, or may be. A program may keep any number of those, as transformers keeps each
expert's part of all layers while it saves a model, so they have no memory of the pool."""

_BY_SHAPE = frozenset({"expand_as", "reshape_as", "view_as"})
"""Functions of these whose other argument is a tensor, of which they need the shape."""


def _views(call: Call, view: EvictedView) -> Any:
    """The result of `call`, one of `_MAKES_VIEWS`, without the values; None if not all of it shares their memory."""
    rest: Any = (call.args[1:], dict(call.kwargs))
    if call.name in _BY_SHAPE:
        rest = tree_map_only(torch.Tensor, lambda other: torch.empty(other.shape, device="meta"), rest)
    elif not all(type(item) in (int, slice, type(None), type(...)) for item in tree_iter(rest)):
        return None

    def of(like: torch.Tensor) -> Any:
        result = call.func(like, *rest[0], **rest[1])
        if call.name == "as_strided":
            _check_bounds(result)
        return result

    found = parts_of(view.source, of)
    if isinstance(found, (list, tuple)):
        return type(found)(map(EvictedView, found))
    if found is None:
        return None
    return view if found is view.source else EvictedView(found)


def _check_bounds(like: torch.Tensor) -> None:
    """Raise the error that torch raises for a tensor with memory, if `like` does not begin and end in its memory."""
    needed_bytes = like.storage_offset() * like.itemsize + spanned_bytes(like) if like.numel() else 0
    if needed_bytes > (length_bytes := like.untyped_storage().nbytes()):
        raise RuntimeError(
            f"setStorage: sizes {list(like.shape)}, strides {list(like.stride())}, storage offset "
            f"{like.storage_offset()}, and itemsize {like.itemsize} requiring a storage size of {needed_bytes} are out "
            f"of bounds for storage of size {length_bytes}"
        )


def viewed_by(tensor: object) -> torch.Tensor | None:
    """The parameter of which all of `tensor` is a view, as in state dicts; None if it is none."""
    source = tensor.source if isinstance(tensor, EvictedView) else None
    return source.parameter if isinstance(source, ViewOfParameter) else None


def as_in_state_dict(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that an ordinary state dict has of a parameter or buffer: of the same memory, without grad."""
    if (home := home_of(tensor)) is not None:
        return EvictedView(ViewOfParameter(tensor, home))
    return tensor.detach()


def _parameter_of(source: Source) -> torch.Tensor | None:
    while isinstance(source, PartOfView):
        source = source.whole
    return source.parameter if isinstance(source, ViewOfParameter) else None


def one_by_one(call: Call) -> Any:
    """Run a function that does the same to each tensor of a list, as `torch._foreach_lerp_`, on one after the other.

    So no two of a model's parameters need to be in memory at once. torch does so itself on the CPU; elsewhere its
    kernels do the same to a list of one tensor, if they would have taken the whole list.

    Returns:
        NotImplemented if they would not; and for an optimizer's step, which makes a dozen such calls.
    """
    module = call.caller.f_globals.get("__name__", "")
    steps = module.startswith("torch.optim.") and module != AveragedModel.__module__
    if steps or not isinstance(call.first, (list, tuple)) or (count := len(call.first)) < 2:
        return NotImplemented
    tensors = [each for each in tree_iter((call.args, call.kwargs)) if isinstance(each, torch.Tensor)]
    kinds = {(each.device, each.dtype) for each in tensors}
    if len(kinds) > 1 and any(device.type != "cpu" for device, _ in kinds):
        return NotImplemented

    def of(i: int, argument: Any) -> Any:
        is_list = isinstance(argument, (list, tuple)) or (isinstance(argument, torch.Tensor) and argument.dim() == 1)
        return argument[i : i + 1] if is_list and len(argument) == count else argument

    results = []
    for i in range(count):
        args = tuple(of(i, each) for each in call.args)
        results.append(run(call.func, args, {key: of(i, each) for key, each in call.kwargs.items()}))
    return None if results[0] is None else type(results[0])(each for result in results for each in result)


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bare: bool = False) -> Any:
    """Run `func` with all evicted values in memory.

    Args:
        bare: let it have tensors without values too, which else refuse themselves to be read.
    """
    homes: list[Home] = []
    unfilled = False
    views: dict[int, EvictedView] = {}
    for item in tree_iter((args, kwargs)):
        if isinstance(item, EvictedView):
            views[id(item)] = item
            homes += item.source.homes()
            parameter = _parameter_of(item.source)
            unfilled = unfilled or (parameter is not None and UNFILLED in vars(parameter))
        elif (home := home_of(item)) is not None:
            homes.append(home)
            unfilled = unfilled or UNFILLED in vars(item)
        elif isinstance(item, EvictedGradient):
            item.bring_back()
    plainly = nullcontext() if unfilled and not bare else torch._C.DisableTorchFunctionSubclass()
    with present(homes), plainly:
        wholes, targets = _Wholes(), [*tree_iter((args[:1], kwargs.get("out")))]
        real = {key: wholes.real(view.source) for key, view in views.items()}
        if views:
            args, kwargs = tree_map_only(EvictedView, lambda view: real[id(view)], (args, kwargs))
        result = run_collective(func, args, kwargs) if is_collective(func) else func(*args, **kwargs)
        if not views:
            return result
        wholes.note_written(func, targets, "out" in kwargs)
        view_of = {id(real[key]): view for key, view in views.items()}  # What works in place gives it back.
        if type(result) in (list, tuple):
            return type(result)(view_of.get(id(item), item) for item in result)
        return view_of.get(id(result), result)


class _Wholes:
    """The values of the tensors that the views of one call are parts of, and whether the call has written to them."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Source, torch.Tensor, int]] = {}

    def real(self, source: Source) -> torch.Tensor:
        """The values of `source`. Parts of one tensor share its memory."""
        whole = source.whole if isinstance(source, PartOfView) else source
        if id(whole) not in self._found:
            values = whole.real()
            self._found[id(whole)] = whole, values, 0 if values.is_inference() else values._version
        values = self._found[id(whole)][1]
        return source.of(values) if isinstance(source, PartOfView) else values

    def note_written(self, func: Callable[..., Any], targets: Sequence[object], to_out: bool) -> None:
        """Tell sources that give other memory each time what was written, which would be lost.

        Args:
            targets: what the call may have written to. In inference mode no tensor knows that it was.
            to_out: some of them are the argument `out`.
        """
        name = getattr(func, "__name__", "").partition(".")[0]
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__")) or to_out
        sources = [view.source for view in targets if isinstance(view, EvictedView)] if writes else []
        targeted = {id(source.whole if isinstance(source, PartOfView) else source) for source in sources}
        for key, (whole, values, version) in self._found.items():
            if key in targeted if values.is_inference() else values._version != version:
                whole.written(values)


_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow"))})
"""Functions that write, with names that do not say so."""


def _lacks_values(item: object) -> bool:
    return isinstance(item, (EvictedView, EvictedGradient)) or home_of(item) is not None


watch_lists(_lacks_values, run)
