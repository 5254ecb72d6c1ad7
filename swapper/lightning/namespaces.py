"""The classes of `swapper.lightning` for one of the packages `lightning` and `pytorch_lightning`.

See [Note: two Lightnings] in `swapper.lightning.strategy`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from swapper.lightning.files import FilesOfTorch
from swapper.lightning.monitor import Monitor
from swapper.lightning.strategy import OnDDP, OnOneDevice
from swapper.strategy import arguments as strategy_arguments
from swapper.strategy.arguments import ARGUMENTS

__all__ = ["bind", "register"]


def bind(package: str, module: str) -> dict[str, Any]:
    """The classes for a package.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".
        module: where they will be found, by pickle too.
    """
    strategies = importlib.import_module(f"{package}.strategies")
    plugins = importlib.import_module(f"{package}.plugins")
    wrapping = importlib.import_module(f"{package}.plugins.io.wrapper")._WrappingCheckpointIO

    class SwapCheckpointIO(FilesOfTorch, plugins.TorchCheckpointIO):  # type: ignore[misc, name-defined]
        """Ordinary checkpoint files for any strategy, written and read through the engine, and checked when read.

        A file appears under its name when it is complete and synced; what had the name is whole until then.

        Args:
            background: return as soon as the tensors are copied in memory, and write meanwhile. What fails is raised
                by the next save, load or removal, or at the end.
        """

    class SwapStrategy(OnOneDevice, strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
        _files, _wrapping = SwapCheckpointIO, wrapping
        __doc__ = f"""Train on one device, with optimizer state, gradients and parameters where a config says.

    {ARGUMENTS}"""

    class SwapDDPStrategy(OnDDP, strategies.DDPStrategy):  # type: ignore[misc, name-defined]
        _files, _wrapping = SwapCheckpointIO, wrapping
        __doc__ = f"""`DDPStrategy`, with optimizer state, gradients and parameters of each process where a config says.

    {ARGUMENTS}"""

    class SwapMonitor(Monitor, importlib.import_module(f"{package}.callbacks").Callback):  # type: ignore[misc]
        """Logs what swapping moves, every `log_every_n_steps`, to all loggers, as `swapper/...`.

        bytes_read_per_step, bytes_written_per_step and their sum bytes_per_step; bytes_per_s; wait_share, the part of
        the time in which training waited for the drive; bytes_written since the optimizers were made; pool_bytes and
        pool_peak_bytes; endurance_days, after which writing on like this has worn a drive out. On each rank its own.

        Args:
            progress_bar: show bytes per step and the share of waits.
            endurance_bytes: what the drive is rated for, as "600TB"; see its data sheet for TBW.
        """

    classes = (SwapStrategy, SwapDDPStrategy, SwapCheckpointIO, SwapMonitor)
    for each in classes:
        each.__module__, each.__qualname__ = module, each.__name__
    return {each.__name__: each for each in classes}


def register(package: str, classes: Mapping[str, Any]) -> None:
    """Let `Trainer(strategy="swapper_nvme")` of a package find the strategies. May be called again."""
    strategy_arguments.register(importlib.import_module(f"{package}.strategies").StrategyRegistry, classes)
