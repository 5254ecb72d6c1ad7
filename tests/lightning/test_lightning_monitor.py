"""`SwapMonitor`: what it logs is what has moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import Logger
from lightning_runs import IGNORED_WARNINGS, facts, fit, strategy_of

import swapper
from swapper.errors import ConfigError
from swapper.lightning import SwapMonitor

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]


class Noted(Logger):
    """Keeps what it is given."""

    name, version = "noted", "0"

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("swapper/") for name in metrics):
            self.metrics.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("what", ["state", "state-gradients-parameters"])
def test_what_is_logged_is_what_has_moved(what: str, nvme_path: Path) -> None:
    logger = Noted()
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 2, "accumulate_grad_batches": 2, "max_epochs": 4}
    trainer = fit(strategy_of(nvme_path, what), callbacks=[SwapMonitor()], **options)
    assert trainer.global_step == 12
    assert len(logger.metrics) == 6
    last = logger.metrics[-1][1]
    stats = swapper.of(trainer.optimizers[0]).stats()
    written = stats.bytes_written + stats.gradients.bytes_written
    if what != "state":
        written += trainer.lightning_module.swapper.metrics.bytes_written
    assert last["swapper/bytes_written"] == written
    assert sum(2 * metrics["swapper/bytes_written_per_step"] for _, metrics in logger.metrics) <= written
    for _, metrics in logger.metrics:
        both = metrics["swapper/bytes_read_per_step"] + metrics["swapper/bytes_written_per_step"]
        assert metrics["swapper/bytes_per_step"] == both > 0
        assert 0 < metrics["swapper/pool_peak_bytes"] <= metrics["swapper/pool_bytes"] == 1 << 20
        assert metrics["swapper/endurance_days"] > 0
    assert set(trainer.progress_bar_metrics) >= {"swap_MB/step", "swap_wait"}
    assert trainer.progress_bar_metrics["swap_MB/step"] == pytest.approx(last["swapper/bytes_per_step"] / 1e6)


def test_it_changes_nothing_and_needs_no_strategy_of_ours(nvme_path: Path) -> None:
    def watched(strategy: Any) -> dict[str, Any]:
        found = dict(facts(fit(strategy, callbacks=[SwapMonitor(progress_bar=False)])))
        return found

    assert watched("auto") == facts(fit()) == watched(strategy_of(nvme_path))


def test_a_drive_without_endurance_is_refused() -> None:
    with pytest.raises(ConfigError, match="endurance_bytes: 0"):
        SwapMonitor(endurance_bytes=0)
