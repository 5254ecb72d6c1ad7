"""Refuses weights in files where `load_state_dict` would give the model other values than the files have.

Hooks of a module, and a `_load_from_state_dict` of its own, may change what is loaded: fold a scale in, or order rows
as a newer version has them. Weights that stay in their files are not loaded. So both are called with tensors of the
meta device, which have no values, to see whether the model would get those tensors as they are.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swapper.errors import SwapError, show

__all__ = ["refuse_own_loading"]

log = logging.getLogger(__name__)

_COPY: Any = torch.ops.aten.copy_.default


def refuse_own_loading(model: torch.nn.Module) -> None:
    """Refuse a model whose own way of loading changes values. Its tensors are neither read nor written.

    Raises:
        SwapError: names module and tensor.
    """
    state = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    with torch.no_grad():
        _load(model, state, "")
    if late := [name or "the model" for name, each in model.named_modules() if each._load_state_dict_post_hooks]:
        log.warning(
            "weights: hooks that are registered by register_load_state_dict_post_hook are not called, because weights "
            "that stay in their files are not loaded: those of %s",
            ", ".join(late),
        )


def _load(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str) -> None:
    """As `load_state_dict` goes through modules."""
    own = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
    if own or module._load_state_dict_pre_hooks:
        given, changes = dict(state), _Changes()
        arguments: tuple[Any, ...] = (state, prefix, {}, True, [], [], [])
        try:
            with changes:
                if own:  # It calls the hooks.
                    _twin(module)._load_from_state_dict(*arguments)
                else:
                    for hook in module._load_state_dict_pre_hooks.values():
                        hook(*arguments)
        except Exception as error:
            raise _refused(module, prefix, f"cannot be tried on tensors without values ({show(error)})") from error
        changed = [key for key, tensor in given.items() if state.get(key) is not tensor]
        if changed or changes.found:
            raise _refused(module, prefix, f"changes {', '.join(changed[:3]) or 'what it has loaded'}")
    for name, child in module._modules.items():
        if child is not None:
            below = {key: value for key, value in state.items() if key.startswith(f"{prefix}{name}.")}
            _load(child, below, f"{prefix}{name}.")


def _refused(module: torch.nn.Module, prefix: str, what: str) -> SwapError:
    return SwapError(
        f"weights: {prefix.rstrip('.') or 'the model'}, a {type(module).__name__}, loads a state dict in its own way, "
        f"which {what}, so the model's values would not be those in the files; offload it with swapper.materialize and "
        "swapper.load_safetensors instead of weights"
    )


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with parameters and buffers on the meta device, in place of its own."""
    twin = copy.copy(module)
    parts = vars(twin)
    for names, make in (("_parameters", torch.nn.Parameter), ("_buffers", torch.Tensor)):
        parts[names] = dict(_on_meta(vars(module)[names], make))
    return twin


def _on_meta(tensors: Mapping[str, torch.Tensor | None], make: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, tensor in tensors.items():
        if tensor is None:
            yield name, None
            continue
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        yield name, make(values, tensor.requires_grad) if make is torch.nn.Parameter else values


class _Changes(TorchDispatchMode):
    """Notes operations that change a tensor without values, beside that by which a parameter gets what was loaded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = func._schema.is_mutable and func is not _COPY
        self.found |= changes and any(isinstance(each, torch.Tensor) and each.is_meta for each in args[:1])
        return func(*args, **(kwargs or {}))
