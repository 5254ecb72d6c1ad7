"""The values that an optimizer's class, or a hook, adds to its `state_dict()`: saved beside the state of parameters."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.state_writer import StateDict, kind_of, swapper_of
from swapper.errors import SwapError, SwapIOError
from swapper.optimizer.encodings import STEPS
from swapper.optimizer.plan import parameters_of
from swapper.optimizer.state_dicts import GivenState, is_shared
from swapper.optimizer.swapper import OptimizerSwapper

__all__ = ["rest_of", "state_dict_of"]


def rest_of(state_dict: Mapping[str, Any], names: Container[Any], given: Container[int] = ()) -> dict[str, Any]:
    """Return all of `state_dict` but the options of groups and the state of the parameters `names`.

    State that belongs to no parameter is "state" in what is returned.

    Args:
        given: `id` of what is the state of parameters by whatever name: a hook may give others.
    """
    rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups", STEPS)}
    state = state_dict.get("state", {}).items()
    named = {name: value for name, value in state if name not in names and id(value) not in given}
    return {**rest, "state": named} if named else rest


def state_dict_of(optimizer: Optimizer) -> StateDict:
    """All of an optimizer's state dict but the state of parameters.

    `state_dict()` is called where a class, or a hook, may add to it. Swapped state is copied to the drive for that, of
    one parameter first, and of all where something is added, or the model is sharded.

    Raises:
        SwapError: it is none that a checkpoint can have; or it failed.
        SwapIOError: the drive failed.
    """
    swapper = swapper_of(optimizer)
    if not _is_own(optimizer, swapper is not None):
        state = {} if swapper is not None else optimizer.state
        named = {name: value for name, value in state.items() if not isinstance(name, torch.Tensor)}
        return StateDict(optimizer.param_groups, {"state": named} if named else {})
    if swapper is None:
        entries = {i: optimizer.state.get(p) or {} for i, p in enumerate(parameters_of(optimizer))}
        return _split(optimizer, None, GivenState(False, entries, set(map(id, entries.values()))))
    if not is_shared(optimizer):  # Where ranks may find different things, all go on in one way.
        try:
            found = _split(optimizer, swapper, GivenState(True))
        except Exception:  # What it asks for is not there, perhaps.
            found = None
        if found is not None and not found.rest and _have_same_options(found.groups, optimizer.param_groups):
            return found
    return _split(optimizer, swapper, GivenState(False))


def _is_own(optimizer: Optimizer, swapped: bool) -> bool:
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer):
        return True  # Such a class need not have called torch's `__init__`, which makes what has the hooks.
    hooks = len(optimizer._optimizer_state_dict_pre_hooks) + len(optimizer._optimizer_state_dict_post_hooks)
    return hooks > int(swapped)  # One is the swapper's.


def _have_same_options(groups: Sequence[Mapping[str, Any]], those: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        group.keys() == other.keys() and all(group[key] is other[key] for key in group if key != "params")
        for group, other in zip(groups, those, strict=True)
    )


def _split(optimizer: Optimizer, swapper: OptimizerSwapper | None, given: GivenState) -> StateDict:
    kind = kind_of(optimizer)
    try:
        notes = nullcontext() if swapper is None else swapper.flushed_records().giving(given)
        with notes:
            found: Any = optimizer.state_dict()
    except (SwapError, SwapIOError):
        raise
    except Exception as error:
        raise SwapError(
            f"state_dict() of the optimizer ({kind}), which has what belongs into a checkpoint too, failed: {error!r}"
        ) from error
    if not isinstance(found, Mapping) or not isinstance(found.get("state", {}), Mapping):
        raise SwapError(
            f"state_dict() of the optimizer ({kind}) is no dictionary with a dictionary of state, and cannot be saved; "
            "save it by torch.save"
        )
    state, count = found.get("state", {}), sum(len(group["params"]) for group in optimizer.param_groups)
    for number, entry in state.items():
        if isinstance(number, int) and 0 <= number < count and entry:
            if not given.entries.get(number):
                raise SwapError(
                    f"{kind} has state of parameters in its state_dict() that is not in its attribute `state`, from "
                    "which checkpoints are written; give the optimizer that steps (the inner one, of one that wraps "
                    "another), or save its state_dict() by torch.save"
                )
            _check_entry(kind, number, entry, given.entries[number])
    groups: Any = found.get("param_groups")
    if not _are_alike(groups, optimizer.param_groups):
        groups = optimizer.param_groups
    return StateDict(groups, rest_of(found, range(count), given.ids))


def _check_entry(kind: str, number: int, entry: Any, given: Mapping[Any, Any]) -> None:
    """Refuse what is added to the state of a parameter. What a class makes of all of it, in another form, is not."""
    if isinstance(entry, Mapping) and (added := entry.keys() - given.keys()) and not given.keys() - entry.keys():
        raise SwapError(
            f"state_dict() of the optimizer ({kind}) adds {next(iter(added))!r} to the state of parameter {number}, "
            'where a checkpoint has what is in optimizer.state; add it beside "state" and "param_groups"'
        )


def _are_alike(groups: object, those: Sequence[Mapping[str, Any]]) -> bool:
    """True if both are groups with as many parameters."""
    return (
        isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        and [len(group["params"]) for group in groups] == [len(group["params"]) for group in those]
    )
