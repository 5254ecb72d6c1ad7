"""`SwapMonitor` logs the bytes that swapping moves, and the waits for them, to any Logger and in the progress bar."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from swapper.config import parse_size
from swapper.errors import ConfigError
from swapper.metrics import Moves, moves_of
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.parameter.swapper import ParameterSwapper
from swapper.strategy.swapping import swapper_of

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object

__all__ = ["Monitor"]

_DAY_S = 86400


class Monitor(Callback):
    """Logs what swapping moves, every `log_every_n_steps`, to all loggers, as `swapper/...`.

    bytes_read_per_step, bytes_written_per_step and their sum bytes_per_step; bytes_per_s; wait_share, the part of
    the time in which training waited for the drive; bytes_written since the optimizers were made; pool_bytes and
    pool_peak_bytes; endurance_days, after which writing on like this has worn a drive out. On each rank its own.

    Args:
        progress_bar: show bytes per step and the share of waits.
        endurance_bytes: what the drive is rated for, as "600TB"; see its data sheet for TBW.
    """

    def __init__(self, *, progress_bar: bool = True, endurance_bytes: int | str = "600TB") -> None:
        self._progress_bar = progress_bar
        self._endurance_bytes = parse_size(endurance_bytes)
        if not self._endurance_bytes:
            raise ConfigError("endurance_bytes: 0 is no endurance; write what the drive is rated for, such as '600TB'")
        self._steps = self._logged = 0
        self._since_s = 0.0
        self._before = Moves()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here."""
        self._steps = self._logged = trainer.global_step
        self._since_s = time.monotonic()
        self._before = _moved(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, every `log_every_n_steps` of the Trainer."""
        if trainer.global_step == self._steps:  # In the middle of an accumulation.
            return
        self._steps = trainer.global_step
        if self._steps - self._logged < max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        metrics = self._metrics(trainer)
        if self._progress_bar:
            shown = {"swap_MB/step": "bytes_per_step", "swap_wait": "wait_share"}
            values = {name: metrics[f"swapper/{key}"] for name, key in shown.items()}
            values["swap_MB/step"] /= 1e6
            pl_module.log_dict(values, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        now_s, moved = time.monotonic(), _moved(trainer)
        steps, took_s = self._steps - self._logged, max(now_s - self._since_s, 1e-9)
        read = moved.bytes_read - self._before.bytes_read
        written = moved.bytes_written - self._before.bytes_written
        wait_s = moved.wait_read_s + moved.wait_write_s - self._before.wait_read_s - self._before.wait_write_s
        self._logged, self._since_s, self._before = self._steps, now_s, moved
        pools = [swapper.stats() for swapper in _swappers(trainer)]
        found = {
            "bytes_per_step": (read + written) / steps,
            "bytes_read_per_step": read / steps,
            "bytes_written_per_step": written / steps,
            "bytes_per_s": (read + written) / took_s,
            "wait_share": wait_s / took_s,
            "bytes_written": float(moved.bytes_written),
            # All optimizers of a strategy have one pool.
            "pool_peak_bytes": float(max((stats.pool_peak_bytes for stats in pools), default=0)),
            "pool_bytes": float(max((stats.pool_bytes for stats in pools), default=0)),
        }
        if written:
            found["endurance_days"] = self._endurance_bytes / (written / took_s * _DAY_S)
        return {f"swapper/{name}": value for name, value in found.items()}


def _swappers(trainer: Trainer) -> list[OptimizerSwapper]:
    return [swapper for swapper in map(swapper_of, trainer.optimizers) if swapper is not None]


def _moved(trainer: Trainer) -> Moves:
    """All that moved, of state, gradients and parameters."""
    parts = [moves_of(swapper.metrics) for swapper in _swappers(trainer)]
    parts += [swapper.stats().gradients for swapper in _swappers(trainer)]
    parameters = vars(trainer.lightning_module).get("swapper")
    if isinstance(parameters, ParameterSwapper):
        parts.append(moves_of(parameters.metrics))
    return Moves(**{f.name: sum(getattr(part, f.name) for part in parts) for f in dataclasses.fields(Moves)})
