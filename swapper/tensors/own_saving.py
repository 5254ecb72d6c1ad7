"""State dicts of tensors that put what is inside of them there by themselves, as those of optimum-quanto do.

Modules of optimum-quanto call `save_to_state_dict` of their weight, which looks for tensors whose class is torch's own.
The class of one that is evicted is not, so it was taken for one more tensor that is made of others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from swapper.tensors.evicted import is_evicted
from swapper.tensors.evicted_views import as_in_state_dict
from swapper.tensors.inner import inner_tensors, is_wrapper

__all__ = ["let_evicted_be_saved"]

_NAME = "save_to_state_dict"


def let_evicted_be_saved(tensors: Iterable[torch.Tensor]) -> None:
    """Have the classes of `tensors` that save themselves do so while what is inside is evicted. Idempotent.

    Of the class, not of the tensor: attributes of a tensor are copied with it. Where nothing is evicted it does what it
    did.
    """
    for own in {type(tensor) for tensor in tensors if is_wrapper(tensor)}:
        # The first to define it: others call that, some after they have put codes back into another order.
        first = next((each for each in reversed(own.__mro__) if _NAME in vars(each)), None)
        if first is not None and not hasattr(plain := vars(first)[_NAME], "__wrapped__"):
            setattr(first, _NAME, _saving(plain))


def _saving(plain: Any) -> Any:
    @functools.wraps(plain)
    def save(self: torch.Tensor, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        if not any(is_evicted(inner.tensor) for inner in inner_tensors("", self)):
            plain(self, destination, prefix, keep_vars)
            return
        for key in self.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(self, key)
            if is_wrapper(inner):
                save(inner, destination, f"{prefix}{key}.", keep_vars)
            else:
                destination[prefix + key] = inner if keep_vars else as_in_state_dict(inner)

    return save
