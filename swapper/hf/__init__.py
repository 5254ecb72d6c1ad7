"""For Hugging Face's libraries: `SwapCallback` and `SwapTrainer` for the Trainer, `prepare` for accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapper.hf.accelerator import prepare
    from swapper.hf.trainer import SwapCallback, SwapTrainer

__all__ = ["SwapCallback", "SwapTrainer", "prepare"]


def __getattr__(name: str) -> object:
    if name == "prepare":  # Not above: `swapper.OffloadedCache` is in this package, and needs no accelerate.
        from swapper.hf.accelerator import prepare

        return prepare
    if name in __all__:
        from swapper.hf import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
