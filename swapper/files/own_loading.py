"""Refuses weights in files where `load_state_dict` would give the model other values than the files have.

Hooks of a module, and a `_load_from_state_dict` of its own, may change what is loaded: fold a scale in, or order rows
as a newer version has them. Weights that stay in their files are not loaded. So both are called with tensors of the
meta device, which have no values, to see whether the model would get those tensors as they are.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swapper.errors import SwapError, show

__all__ = ["refuse_own_loading"]

log = logging.getLogger(__name__)

_COPY: Any = torch.ops.aten.copy_.default


def refuse_own_loading(model: torch.nn.Module) -> None:
    """Refuse a model whose own way of loading changes values, as far as tensors without values show it.

    What hooks do to anything else, as to an attribute of their module, they do once, as when a state dict is loaded.

    Raises:
        SwapError: names module and tensor.
    """
    _refuse_converted(model)
    tensors = model.state_dict(keep_vars=True)
    state = {name: _on_meta(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        _load(model, state, "")
    if type(model).load_state_dict is not torch.nn.Module.load_state_dict or "load_state_dict" in vars(model):
        log.warning(
            "weights: the load_state_dict of %s is its own, and is not called, because weights that stay in their "
            "files are not loaded; if it changes values use swapper.materialize and swapper.load_safetensors",
            type(model).__name__,
        )
    if late := [name or "the model" for name, each in model.named_modules() if each._load_state_dict_post_hooks]:
        log.warning(
            "weights: hooks that are registered by register_load_state_dict_post_hook are not called, because weights "
            "that stay in their files are not loaded: those of %s",
            ", ".join(late),
        )


def _load(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str) -> None:
    """As `load_state_dict` goes through modules."""
    own = _loads_itself(module)
    if own or module._load_state_dict_pre_hooks:
        given = dict(state)
        arguments: tuple[Any, ...] = (state, prefix, {}, True, [], [], [])
        try:
            if own:
                what = _try_own(_twin(module), given, arguments)
            else:
                with _Changes({}) as changes:
                    for hook in module._load_state_dict_pre_hooks.values():
                        hook(*arguments)
                what = "a tensor" if changes.found else ""
        except Exception as error:
            raise _refused(module, prefix, f"cannot be tried on tensors without values ({show(error)})") from error
        what = ", ".join([key for key, tensor in given.items() if state.get(key) is not tensor][:3]) or what
        if what:
            raise _refused(module, prefix, f"changes {what}")
    for name, child in module._modules.items():
        if child is not None and any(
            each._load_state_dict_pre_hooks or _loads_itself(each) for each in child.modules()
        ):
            below = {key: value for key, value in state.items() if key.startswith(f"{prefix}{name}.")}
            _load(child, below, f"{prefix}{name}.")


def _loads_itself(module: torch.nn.Module) -> bool:
    on_class = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
    return on_class or "_load_from_state_dict" in vars(module)


def _try_own(twin: torch.nn.Module, given: Mapping[str, torch.Tensor], arguments: tuple[Any, ...]) -> str:
    """Call its `_load_from_state_dict`, which calls the hooks, too. Returns what is changed in its own way, or ""."""
    before = _tensors_of(twin)
    prefix = arguments[1]
    gets = {id(tensor): id(given[key]) for name, (tensor, _) in before.items() if (key := prefix + name) in given}
    with _Changes(gets) as changes:
        twin._load_from_state_dict(*arguments)
    after = _tensors_of(twin)
    same = before.keys() == after.keys() and all(
        each is after[name][0] and memory == after[name][1] for name, (each, memory) in before.items()
    )
    return "" if same and not changes.found and not changes.expected else "what it has loaded"


def _refused(module: torch.nn.Module, prefix: str, what: str) -> SwapError:
    return SwapError(
        f"weights: {prefix.rstrip('.') or 'the model'}, a {type(module).__name__}, loads a state dict in its own way, "
        f"which {what}, so the model's values would not be those in the files; offload it with swapper.materialize and "
        "swapper.load_safetensors instead of weights"
    )


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with parameters and buffers on the meta device, in place of its own."""
    twin = copy.copy(module)
    vars(twin).update(
        _parameters={
            name: None if p is None else torch.nn.Parameter(_on_meta(p), p.requires_grad)
            for name, p in module._parameters.items()
        },
        _buffers={name: None if buffer is None else _on_meta(buffer) for name, buffer in module._buffers.items()},
        _modules=dict(module._modules),
    )
    return twin


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _tensors_of(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Parameters and buffers of the module itself, each with what tells its memory from other."""
    own = {**module._parameters, **module._buffers}
    return {name: (each, each.untyped_storage()._cdata) for name, each in own.items() if each is not None}


class _Changes(TorchDispatchMode):
    """Notes operations that change a tensor without values, beside those by which parameters get what was loaded.

    Attributes:
        expected: by `id` of a parameter that of the tensor which it is to get. Those that have got it are taken out.
        found: something else was changed.
    """

    def __init__(self, expected: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.expected = expected
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY and self.expected.get(id(args[0])) == id(args[1]):
            del self.expected[id(args[0])]
        elif func._schema.is_mutable:
            self.found |= any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


_CONVERTED = ("gptq", "auto-round")
"""Methods of quantisation, as transformers names them, whose tensors are changed in place after they are loaded."""


def _refuse_converted(model: torch.nn.Module) -> None:
    """Refuse a model of transformers whose buffers are not those of its files, though they have the same layout."""
    for module in model.modules():
        said = getattr(getattr(module, "config", None), "quantization_config", None) or {}
        method = (said if isinstance(said, dict) else vars(said)).get("quant_method")
        if method in _CONVERTED:
            raise SwapError(
                f"weights: tensors of a model that is quantised by {getattr(method, 'value', method)} are changed "
                "after they are loaded (zero points, for example), so the files have other values; call "
                "swapper.offload without weights"
            )
