"""Tensors of a model within other values: saved as references to the model's files. Used for Lightning's checkpoints.

Lightning makes a dictionary of all there is, and lets hooks read and change it. The tensors in it that are the model's,
wherever a hook may have put them, are saved as references; what a hook has replaced is saved as it is. So hooks see
what they always see, and no tensor is copied that no hook has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["OPTIMIZER_STATES", "is_lightnings", "refer", "replaced", "resolve", "without_model"]

OPTIMIZER_STATES = "optimizer_states"
"""Lightning's key of the state that an optimizer's files hold."""

_REFERENCE = "swapper.model"


def is_lightnings(extra: object) -> bool:
    """True if Lightning has made the `extra` of a checkpoint."""
    return isinstance(extra, dict) and "pytorch-lightning_version" in extra


def refer(value: Any, names: Mapping[int, str]) -> Any:
    """`value` with references in the place of tensors, whose names are given by their ids."""
    return replaced(value, torch.Tensor, lambda item: {_REFERENCE: names[id(item)]} if id(item) in names else item)


def resolve(value: Any, tensors: Mapping[str, Any]) -> Any:
    """`value` with tensors, given by their names, in the place of references."""
    return replaced(value, dict, lambda item: tensors[item[_REFERENCE]] if item.keys() == {_REFERENCE} else item)


def without_model(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra` of a checkpoint without the state dict that is in it, if that is the model's, with all names."""
    state = extra.get("state_dict", {})
    same = all(value == {_REFERENCE: name} for name, value in state.items())
    return {key: value for key, value in extra.items() if key != "state_dict" or not same}


def replaced(value: Any, of: type, by: Callable[[Any], Any]) -> Any:
    """A copy of nested containers in which each item of class `of` is what `by` makes of it."""
    if isinstance(value, of):
        found = by(value)
        if found is not value:
            return found
    if type(value) is list:
        return [replaced(item, of, by) for item in value]
    if type(value) is tuple:
        return tuple(replaced(item, of, by) for item in value)
    if isinstance(value, dict):
        items = {key: replaced(item, of, by) for key, item in value.items()}
        if type(value) is dict:
            return items
        if all(items[key] is item for key, item in value.items()):
            return value
        copied = copy.copy(value)  # With its attributes: torch keeps the versions of modules in one.
        copied.update(items)
        return copied
    return value
