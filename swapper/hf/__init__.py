"""For Hugging Face's libraries: `SwapCallback` and `SwapTrainer` for the Trainer, `prepare` for accelerate."""

from swapper.hf.accelerator import prepare
from swapper.hf.trainer import SwapCallback, SwapTrainer

__all__ = ["SwapCallback", "SwapTrainer", "prepare"]
