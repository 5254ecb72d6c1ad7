"""`SwapCallback`: the Trainer of transformers, and all that derive from it, with everything where a config says.

[Note: where the optimizer is swapped] The Trainer makes its optimizer in `train`, then loads a checkpoint into it, and
then tells its callbacks that training begins. A state that was loaded before it is swapped has been in memory as a
whole. So the callback finds the Trainer that it was given to, when that is made, and has the Trainer's own
`create_optimizer` swap what it returns, or, where accelerate shards the model afterwards, has that swap it. A callback
that is added later does so when training begins.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

from swapper.api.arguments import ConfigLike, as_config
from swapper.config import OffloadConfig
from swapper.errors import ConfigError, SwapError
from swapper.hf.accelerator import shards, swap, swap_when_sharded

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    try:
        from transformers import Trainer, TrainerCallback
    except ImportError as error:
        raise ImportError(
            "swapper.hf needs transformers and accelerate: pip install transformers accelerate"
        ) from error

__all__ = ["SwapCallback", "SwapTrainer"]


class SwapCallback(TrainerCallback):
    """Offload the model and the optimizer of a Trainer: `Trainer(..., callbacks=[SwapCallback(config)])`.

    Works with subclasses of the Trainer too, such as those of TRL. Model, optimizer, `args` and checkpoints stay what
    they are without it: a run may be resumed from a checkpoint that was saved without swapping, and the other way
    round. Losses, parameters and state have the bits of the plain run. What the config names leaves memory when the
    optimizer is made, which the Trainer does in `train`, and is not brought back at its end:
    `model.swapper.close(keep_values=True)` does that.

    Args:
        config: see `swapper.wrap_optimizer`.

    Raises:
        ConfigError: the config is wrong. When training begins: it cannot work with the Trainer's model, optimizer or
            `args`, such as DeepSpeed.
    """

    def __init__(self, config: ConfigLike) -> None:
        self.config = as_config(config)
        self._followed: list[tuple[weakref.ref[Trainer], OffloadConfig]] = []  # No dictionary: TRL's may have no hash.

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the Trainer; its optimizer will be swapped as soon as there is one."""
        self._follow(self._trainer())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Swap what is not swapped yet, for a callback that was added after the Trainer was made."""
        trainer = self._trainer()
        self._follow(trainer)
        self._swap(trainer)

    def _trainer(self) -> Trainer:
        """The Trainer that calls: callbacks are told its model and optimizer, and not itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer):
                return caller
            frame = frame.f_back
        raise SwapError("SwapCallback: not called by a Trainer; call swapper.offload(model, optimizer, config) instead")

    def _follow(self, trainer: Trainer) -> None:
        """Have the Trainer's own methods swap what they make, and load without a copy of the file in memory."""
        self._followed = [followed for followed in self._followed if followed[0]() is not None]
        if any(reference() is trainer for reference, _ in self._followed):
            return
        self._followed.append((weakref.ref(trainer), self._settings_for(trainer)))
        create, load = trainer.create_optimizer, trainer._load_optimizer_and_scheduler

        @wraps(create)
        def create_optimizer(*args: Any, **named: Any) -> Any:
            create(*args, **named)
            if shards(trainer.accelerator):
                swap_when_sharded(trainer.accelerator, self._settings_of(trainer))
            else:
                self._swap(trainer)
            return trainer.optimizer

        @wraps(load)
        def load_optimizer_and_scheduler(*args: Any, **named: Any) -> None:
            # Where it is sharded, ranks send each other what they load, which is in no file.
            with nullcontext() if shards(trainer.accelerator) else _mapping_files():
                load(*args, **named)

        vars(trainer).update(
            create_optimizer=create_optimizer, _load_optimizer_and_scheduler=load_optimizer_and_scheduler
        )

    def _settings_for(self, trainer: Trainer) -> OffloadConfig:
        """The config with the Trainer's accumulation. The same object while nothing differs: the pool belongs to it."""
        shards(trainer.accelerator)
        asked, steps = self.config.gradient_accumulation_steps, trainer.args.gradient_accumulation_steps
        if asked not in (1, steps):
            raise ConfigError(
                f"gradient_accumulation_steps: {asked} in the config, and {steps} in TrainingArguments; leave it "
                "out of the config"
            )
        if self.config.offload_optimizer.step_in_backward and steps != 1:
            raise ConfigError(
                "offload_optimizer.step_in_backward cannot go with gradient_accumulation_steps of TrainingArguments: "
                "the Trainer steps earlier at the end of an epoch; set one of them to false or 1"
            )
        converts = [name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(trainer.args, name, False)]
        if converts and self.config.offload_param.device != "none":
            raise ConfigError(
                f"offload_param cannot go with {converts[0]} of TrainingArguments, which converts the parameters when "
                "evaluate or predict is called after train; leave it out, and set bf16 or fp16 for autocast"
            )
        return self.config if asked == steps else self.config.model_copy(update={"gradient_accumulation_steps": steps})

    def _swap(self, trainer: Trainer) -> None:
        if trainer.optimizer is not None and trainer.model is not None:
            swap(trainer.accelerator, trainer.model, [trainer.optimizer], self._settings_of(trainer))

    def _settings_of(self, trainer: Trainer) -> OffloadConfig:
        return next(settings for reference, settings in self._followed if reference() is trainer)


def _mapping_files() -> AbstractContextManager[Any]:
    """Within it `torch.load` maps files. torch 2.6 has no setting for that, and has what it loads in memory."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return nullcontext()
    mapping: AbstractContextManager[Any] = config.patch({"load.mmap": True})  # type: ignore[attr-defined]
    return mapping


class SwapTrainer(Trainer):
    """A Trainer, or with another one a mixin, that takes the config as an argument: see `SwapCallback`.

        class MyTrainer(SwapTrainer, SFTTrainer): ...

        MyTrainer(model, args, swap_config="config.yaml", train_dataset=...)

    Args:
        swap_config: see `swapper.wrap_optimizer`.
        callbacks: as for the Trainer, and so are all others.
    """

    def __init__(self, *args: Any, swap_config: ConfigLike, callbacks: Any = None, **named: Any) -> None:
        named["callbacks"] = [*(callbacks or []), SwapCallback(swap_config)]
        super().__init__(*args, **named)
