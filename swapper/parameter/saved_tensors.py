"""Tensors that autograd saves of parameters: locations in records instead, so that nothing keeps their buffers."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from swapper.errors import SwapError
from swapper.parameter.cache import BY_ADDRESS, DEVICE_TYPES, Held, ParameterCache
from swapper.tensors.hollow import hollow_of
from swapper.tensors.homes import home_of
from swapper.tensors.inner import is_wrapper
from swapper.tensors.sharded import is_sharded

__all__ = ["in_transform", "refuse_in_transform", "saves_locations", "saving_locations", "watch_hooks_of_users"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor that autograd saved, as a location in a record. Keeps the values though nobody has the model."""

    cache: ParameterCache
    held: Held
    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    version: int
    given: int


@dataclass(frozen=True, slots=True)
class _PackedWrapper:
    """A tensor that autograd saved, and that is made of others."""

    cls: Any
    inside: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class _Hollow(torch.Tensor):
    """Looks like a tensor that was saved, and knows its location."""

    packed: _Packed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Detached it is itself; of anything else the result is a plain tensor."""
        if func is torch.Tensor.detach:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def saving_locations(used: Iterable[object]) -> torch.autograd.graph.saved_tensors_hooks | None:
    """Let autograd save parameters as locations within it; None if it saves nothing, or does so already.

    Args:
        used: within it; others than our parameters are of no interest.

    Raises:
        SwapError: the hooks are disabled, and autograd would save our parameters themselves.
    """
    if not torch.is_grad_enabled():
        return None
    if (others := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        if others[0].__module__ == __name__:  # Of a module around this one, and nobody changed it since.
            return None
        return _with_checkpoint(*others) if others[0].__module__ == "torch.utils.checkpoint" else _with_users(*others)
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        if any(home_of(item) is not None for item in used):
            raise SwapError(
                "swapped parameters are used where saved tensors hooks are disabled, and autograd could not let them go"
            )
        return None
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def saves_locations() -> bool:
    """True if the hooks in force are from `saving_locations`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == __name__


class _AroundCheckpoint(torch.autograd.graph.saved_tensors_hooks):
    """Hooks around those of activation checkpointing, behind which torch finds the user's as behind those.

    Args:
        inner: what checkpointing packs with.
    """

    def __init__(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], inner: Callable[..., Any]
    ) -> None:
        super().__init__(pack, unpack)
        self._inner = inner

    def __enter__(self) -> None:
        if getattr(self._inner, "_checkpoint_internal", False):
            vars(self.pack_hook).update(_checkpoint_internal=True, _user_hooks=self._inner._user_hooks)  # type: ignore[attr-defined]
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        vars(self.pack_hook).pop("_user_hooks", None)  # The graph keeps what packs, in a way that gc cannot see.


def _with_checkpoint(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> torch.autograd.graph.saved_tensors_hooks:
    """The hooks of activation checkpointing, which keep recomputed tensors until backward has used them.

    In forward they keep nothing. For a parameter they are given, when they recompute, a tensor of its shape without
    values that knows the location; it comes out of their unpacking as the object that went in. Where forward saved it
    without these hooks around theirs, as in a module that checkpoints a part of itself, nobody would look at that: then
    they are given the values, which stay in memory until backward has used them.
    """
    comes_here = _placeholders_of(pack) if "_recomputation_hook" in pack.__qualname__ else None

    @_disable_dynamo
    def pack_locations(tensor: torch.Tensor) -> Any:
        if comes_here is None:
            placeholder = pack(tensor)
            if _location_of(tensor) is not None:
                _unpacked_here.add(placeholder)
            return placeholder
        packed = _pack(tensor)
        if not isinstance(packed, _Packed):
            return pack(tensor)
        if not comes_here():
            return pack(tensor.detach())
        located = hollow_of(_Hollow, tensor, tensor.stride())
        located.packed = packed
        return pack(located)

    @_disable_dynamo
    def unpack_locations(saved: Any) -> torch.Tensor:
        tensor = unpack(saved)
        return _unpack(tensor.packed) if isinstance(tensor, _Hollow) else tensor

    return _AroundCheckpoint(pack_locations, unpack_locations, pack)


_unpacked_here: weakref.WeakSet[Any] = weakref.WeakSet()
"""Placeholders of activation checkpointing, of parameters, that are unpacked by hooks of `_with_checkpoint`."""


def _placeholders_of(pack: Callable[[torch.Tensor], Any]) -> Callable[[], bool]:
    """Tells if the tensor that `pack`, of a recomputation, is given next is unpacked by hooks of `_with_checkpoint`."""
    hook = inspect.unwrap(pack)
    known: dict[str, Any] = {}
    if (cells := getattr(hook, "__closure__", None)) is not None:
        known = dict(zip(hook.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))

    def comes_here() -> bool:
        try:
            frame = known["target_frame_ref"]()
            return frame.weak_holders[frame.recomp_counter[known["gid"]]]() in _unpacked_here
        except (KeyError, AttributeError, IndexError, TypeError):  # Another torch: values are never wrong.
            return False

    return comes_here


def _with_users(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks of the user, who is given a view of a parameter, not the parameter: that will have other values, or none.

    If the hook keeps the view, as it is or in a tuple, list or dict, a location is kept instead. Anything else that it
    makes of the view keeps the buffer.
    """

    @_disable_dynamo
    def pack_locations(tensor: torch.Tensor) -> Any:
        if _location_of(tensor) is None:
            return pack(tensor)
        return tree_map_only(torch.Tensor, lambda kept: _location_of(kept) or kept, pack(tensor.detach()))

    @_disable_dynamo
    def unpack_locations(saved: Any) -> torch.Tensor:
        return unpack(tree_map_only(_Packed, _unpack, saved))

    return torch.autograd.graph.saved_tensors_hooks(pack_locations, unpack_locations)


_enter_plainly = torch.autograd.graph.saved_tensors_hooks.__enter__


def watch_hooks_of_users() -> None:
    """From now on hooks that anybody enters are given views of parameters: see `_with_users`. Idempotent.

    Within the forward of a module nobody else would see them come. A parameter that such a hook kept itself would be
    evicted when backward needs it, which autograd, in C++, does not notice. For other tensors nothing changes.
    """
    torch.autograd.graph.saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]


@_disable_dynamo
def _enter(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
    known = hooks.pack_hook.__module__ in (__name__, "torch.utils.checkpoint")  # Ours, or seen by ours.
    _enter_plainly(hooks if known else _with_users(hooks.pack_hook, hooks.unpack_hook))


@_disable_dynamo
def _pack(tensor: torch.Tensor) -> torch.Tensor | _Packed | _PackedWrapper:
    if is_wrapper(tensor):
        keys, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inside = {key: _pack(getattr(tensor, key)) for key in keys}
        if any(not isinstance(each, torch.Tensor) for each in inside.values()):
            return _PackedWrapper(type(tensor), inside, context, tensor.size(), tensor.stride())
    elif (location := _location_of(tensor)) is not None:
        return location
    # Not the tensor itself: an output that its own graph holds would live as long as nobody calls backward.
    return tensor if tensor.grad_fn is None else tensor.detach()


# From torch 2.15 on, checkpointing with a policy applies hooks of the user to what it keeps, or warns that it will.
# Ours have the marks of its own, so that it takes them for none: see `_current_user_saved_tensors_hooks` there.
vars(_pack).update(_checkpoint_internal=True, _user_hooks=None)


def _location_of(tensor: torch.Tensor) -> _Packed | None:
    device = tensor.device
    if device.type not in DEVICE_TYPES or tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    if is_sharded(tensor):  # It has no address. What is on the drive of it FSDP2 has gathered.
        return None
    found = BY_ADDRESS.get((device, tensor.untyped_storage().data_ptr()))
    if found is None:
        return None
    cache_ref, held, index = found
    if (cache := cache_ref()) is None:
        return None
    location, offset = held.plan.locations[index], int(tensor.storage_offset())
    now = location.parameter._version, location.given
    return _Packed(cache, held, index, tensor.dtype, tensor.size(), tensor.stride(), offset, *now)


@_disable_dynamo
def _unpack(packed: torch.Tensor | _Packed | _PackedWrapper) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    if isinstance(packed, _PackedWrapper):
        inside = {key: _unpack(each) for key, each in packed.inside.items()}
        wrapper: torch.Tensor = packed.cls.__tensor_unflatten__(inside, packed.context, packed.size, packed.stride)
        return wrapper
    values = packed.cache.saved(packed.held, packed.index, packed.version, packed.given)
    return values.view(packed.dtype).as_strided(packed.size, packed.stride, packed.storage_offset)


def in_transform() -> bool:
    """True while a transform of torch.func runs, whose tensors have no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_in_transform(used: Iterable[torch.Tensor]) -> None:
    """Raise if one of `used` is a swapped parameter, or wraps one.

    Raises:
        SwapError: it is.
    """
    for tensor in used:
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        if home_of(inner) is not None:
            raise SwapError(
                "a transform of torch.func uses swapped parameters, and could not let them go; call the model by "
                "torch.func.functional_call with copies of them"
            )
