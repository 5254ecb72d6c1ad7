"""The dtypes that state has once it is loaded."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch

from swapper.optimizer.segments import Segment

__all__ = ["as_loaded", "kept_dtype", "loaded_dtype"]


def kept_dtype(key: Any, value: torch.Tensor, segment: Segment) -> torch.dtype:
    """The dtype of state that is taken as it is. With a master, state made for the parameter itself becomes fp32."""
    learnt = segment.learnt.get(key)
    if not segment.master or key == "step" or (learnt is not None and value.dtype == learnt.dtype):
        return value.dtype
    return torch.float32 if value.dtype.is_floating_point else value.dtype


def loaded_dtype(key: Any, value: torch.Tensor, segment: Segment, group: dict[str, Any]) -> torch.dtype:
    """The dtype that `Optimizer.load_state_dict` gives to state, of the tensor that the class steps on."""
    if key == "step":
        return torch.float32 if group.get("capturable") or group.get("fused") else value.dtype
    dtype = torch.float32 if segment.master else segment.parameter.dtype
    return dtype if dtype.is_floating_point else value.dtype


def as_loaded(key: Any, value: Any, segment: Segment, group: dict[str, Any]) -> Any:
    """A copy of `value`, with tensors within it in the dtypes that `Optimizer.load_state_dict` gives to them."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=loaded_dtype(key, value, segment, group), copy=True)
    if isinstance(value, dict):
        return {name: as_loaded(name, item, segment, group) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, deque)):
        return type(value)(as_loaded(None, item, segment, group) for item in value)
    return copy.deepcopy(value)
