"""Parameters that overlap in memory, and the settings that cannot go with that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swapper.errors import ConfigError
from swapper.tensors.homes import home_of
from swapper.tensors.strides import spanned_bytes

__all__ = ["CANNOT_GO_WITH", "check_memory", "names_of", "overlapping", "refuse_foreach_on_one_memory"]

CANNOT_GO_WITH = "offload_optimizer.step_in_backward: true cannot be combined with"


def check_memory(tensors: Mapping[str, torch.Tensor], stepped: Iterable[torch.Tensor]) -> None:
    """Raise unless a step of one tensor in backward leaves alone what autograd has saved of the others.

    Args:
        tensors: by the names that an error has. Those whose values are on the drive have records of their own.
        stepped: those that may be stepped in backward.

    Raises:
        ConfigError: two of them, of which one is stepped, overlap in memory; or share the counter by which torch sees
            that a saved tensor was changed, as two views of one tensor do.
    """
    wanted = {id(p) for p in stepped if p.requires_grad}
    for before, name in overlapping(tensors):
        if not wanted.isdisjoint((id(tensors[name]), id(tensors[before]))):
            raise ConfigError(
                f"{CANNOT_GO_WITH} tensors in the same memory: a step of {before} in backward would change {name}, or "
                "the other way round, before the gradients are complete; let them be one parameter object, give each "
                "memory of its own, or use step_in_backward: false"
            )
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if _span(tensor) is not None:
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in by_storage.values():
        for name in names if len(names) > 1 else ():
            if id(tensors[name]) in wanted and (other := _counted_with(name, names, tensors)):
                raise ConfigError(
                    f"{CANNOT_GO_WITH} views of one tensor: torch takes a step of {name} in backward for a change of "
                    f"{other}, and refuses to go on; give each memory of its own (clone), or use step_in_backward: "
                    "false"
                )


def refuse_foreach_on_one_memory(
    optimizer: Optimizer, stepped: Callable[[torch.nn.Parameter], bool] | None = None
) -> None:
    """Refuse parameters that overlap where all of a group are stepped at once.

    `foreach=True` reads all of them before it writes the first. One after another, as buckets are, the second would be
    read when the first was written. (A loop over parameters, which is the default on the CPU, does the same. On an
    accelerator `foreach=None` is True.)

    Args:
        optimizer: whose groups may have changed since it was wrapped.
        stepped: True for a parameter that the next step is of. None is all.

    Raises:
        ConfigError: two parameters that are stepped at once overlap.
    """

    def is_at_once(group: dict[str, Any], p: torch.nn.Parameter) -> bool:
        asked: bool | None = group.get("foreach", False)
        by_default = asked is None and not group.get("fused") and p.device.type != "cpu"
        return bool(asked) or by_default

    together = (p for group in optimizer.param_groups for p in group["params"] if is_at_once(group, p))
    for before, after in overlapping({p: p for p in together if stepped is None or stepped(p)}):
        names = {p: name for name, p in names_of(optimizer).items()}
        also = "" if after.device.type == "cpu" else ", as None is on an accelerator"
        raise ConfigError(
            f"foreach=True{also}: {names[before]} and {names[after]} are in the same memory, and a swapped optimizer "
            "cannot step them at once; let them be one parameter object, give each memory of its own, or use "
            "foreach=False"
        )


_Key = TypeVar("_Key")


def overlapping(tensors: Mapping[_Key, torch.Tensor]) -> Iterator[tuple[_Key, _Key]]:
    """Keys of tensors whose memory overlaps that of one before them, which comes first.

    The memory of a tensor reaches from its first to its last element.
    """
    spans = {key: span for key, tensor in tensors.items() if (span := _span(tensor)) is not None}
    furthest: dict[torch.device, tuple[_Key, int]] = {}  # what was seen to reach the furthest
    for key, (device, start, stop) in sorted(spans.items(), key=lambda item: item[1][1]):
        before, reaches = furthest.get(device, (key, 0))
        if start < reaches:
            yield before, key
        furthest[device] = max((before, reaches), (key, stop), key=lambda item: item[1])


def _span(tensor: torch.Tensor) -> tuple[torch.device, int, int] | None:
    """Device and addresses of the memory between the first and the last element; None of a tensor without memory."""
    if home_of(tensor) is not None or tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    if tensor.device.type == "meta" or not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.data_ptr() + spanned_bytes(tensor)


def _counted_with(name: str, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Give one of `names` that shares the version counter of tensor `name`."""
    tensor = tensors[name]
    others = {other: tensors[other] for other in names if tensors[other] is not tensor}
    if tensor.is_inference() or any(other.is_inference() for other in others.values()):
        return None
    before = {other: value._version for other, value in others.items()}
    with _unsafe_preserve_version_counter(tensor):
        increment_version(tensor)
        return next((other for other, value in others.items() if value._version != before[other]), None)


def names_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer, by what an error calls them."""
    names = {}
    for number, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [f"{i} of group {number}" for i in range(len(group["params"]))]
        for name, p in zip(known, group["params"], strict=True):
            names[f"parameter {name}, of shape {tuple(p.shape)},"] = p
    return names
