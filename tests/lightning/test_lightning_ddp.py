"""`SwapDDPStrategy` with two processes, to the bit as stock DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning_ddp
import pytest
from lightning_runs import IGNORED_WARNINGS, Net, facts, fit, loader, strategy_of, trainer_of
from ranks import TIMEOUT_S, in_processes, started
from twins import bits

import swapper
from swapper.checkpoint.checkpoint import is_checkpoint

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", lightning_ddp.CASES)
def test_two_processes_end_in_the_bits_of_stock_ddp(name: str, nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(lightning_ddp.train, name, nvme_path)


@pytest.mark.thorough("by default: one process with such a model, and two that save")
def test_checkpoints_and_evaluation_of_a_model_larger_than_the_pool(
    nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    in_processes(lightning_ddp.evaluate_and_resume, tmp_path, nvme_path)
    assert is_checkpoint(tmp_path / "directory" / "after.ckpt")

    def resumed_in_one_process(strategy: object, saved: str) -> object:
        trainer = trainer_of(strategy, max_epochs=4)
        trainer.fit(lightning_ddp.Large(), loader(), loader(), ckpt_path=tmp_path / saved / "after.ckpt")
        return facts(trainer)

    stock = resumed_in_one_process("auto", "stock")
    assert resumed_in_one_process(strategy_of(nvme_path, "state-gradients-parameters"), "directory") == stock
    assert resumed_in_one_process("auto", "full") == stock
    lightning_ddp.collect_garbage()


@pytest.mark.long
def test_a_checkpoint_is_there_when_a_save_returns_on_any_rank(
    nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    in_processes(lightning_ddp.save_copies, tmp_path, nvme_path)


def loaded(path: Path) -> Any:
    """All of a checkpoint, comparable, as plain PyTorch has it."""
    net = Net()
    optimizer = net.configure_optimizers()
    extra = swapper.load_checkpoint(path, net, optimizer)
    return bits(net.state_dict()), bits(optimizer.state_dict()), bits(extra)


@pytest.mark.long
def test_ranks_that_save_together_write_what_rank_0_does_alone(nvme_path: Path, tmp_path: Path) -> None:
    """Then one of them fails in a save, and is killed in one."""
    with started(lightning_ddp.save_together, tmp_path, nvme_path) as context:
        for process in context.processes:
            process.join(TIMEOUT_S)
    assert (tmp_path / "raised").exists(), [process.exitcode for process in context.processes]
    alone, together = tmp_path / "False.ckpt", tmp_path / "True.ckpt"
    assert loaded(together) == loaded(alone)
    resumed = [fit(strategy_of(nvme_path), ckpt_path=path, max_epochs=3) for path in (alone, together)]
    assert facts(resumed[0]) == facts(resumed[1])


@pytest.mark.long
def test_a_program_that_starts_its_own_ranks_and_ctrl_c(nvme_path: Path, leaves_nothing: None) -> None:
    environment = {**os.environ, "SWAPPER_NVME_PATH": str(nvme_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, lightning_ddp.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1, done.stderr
    assert "the same bits" in done.stdout
    assert "KeyboardInterrupt" in done.stderr
