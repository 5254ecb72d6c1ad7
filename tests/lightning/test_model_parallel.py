"""`SwapModelParallelStrategy` with two processes, to the bit as the stock strategy."""

from __future__ import annotations

from pathlib import Path

import lightning_sharded
import pytest
from lightning_runs import IGNORED_WARNINGS
from ranks import in_processes

import swapper
import swapper.lightning

pytestmark = [pytest.mark.filterwarnings(text) for text in IGNORED_WARNINGS]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", lightning_sharded.CASES)
def test_two_processes_end_in_the_bits_of_the_stock_strategy(
    name: str, nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    in_processes(lightning_sharded.fit_and_resume, name, nvme_path, tmp_path)


@pytest.mark.long
def test_directories_are_resumed_by_other_numbers_of_ranks(
    nvme_path: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    """As the stock strategy resumes its own."""
    in_processes(lightning_sharded.train_on, 2, "", nvme_path, tmp_path)
    in_processes(lightning_sharded.train_on, 1, "2", nvme_path, tmp_path, ranks=1)


@pytest.mark.thorough("by default: from two ranks to one")
def test_directories_are_resumed_by_more_ranks(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(lightning_sharded.train_on, 1, "", nvme_path, tmp_path, ranks=1)
    in_processes(lightning_sharded.train_on, 3, "1", nvme_path, tmp_path, ranks=3)


@pytest.mark.thorough("by default: directories that are resumed")
def test_directories_of_weights_and_with_hooks(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(lightning_sharded.load_others, nvme_path, tmp_path)


@pytest.mark.long
def test_annexes(nvme_path: Path, tmp_path: Path, leaves_nothing: None) -> None:
    in_processes(lightning_sharded.with_annexes, nvme_path, tmp_path)


@pytest.mark.long
def test_by_name(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(lightning_sharded.named, nvme_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_format": "file"}, "checkpoint_format: 'file' is not one of directory, full"),
        ({"annex": "."}, "annex: only a checkpoint that is a directory of ours has annexes"),
        ({"annex": 3, "checkpoint_format": "directory"}, "annex: a int is not a path"),
        ({"tensor_paralel_size": 2}, "tensor_paralel_size: .* no such argument"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(swapper.ConfigError, match=message):
        swapper.lightning.SwapModelParallelStrategy(**arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"offload_param": {"device": "nvme"}}, "offload_param.device: nvme cannot be done with SwapFSDPStrategy"),
        ({"offload_gradient": {"device": "nvme"}}, "offload_gradient.device cannot be used with SwapFSDPStrategy"),
        ({"offload_optimizer": {"device": "nvme", "step_in_backward": True}}, "step_in_backward cannot be used"),
    ],
)
def test_what_fsdp1_cannot_do_is_refused_at_once(config: dict[str, object], message: str, nvme_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match=message):
        swapper.lightning.SwapFSDPStrategy({"nvme_path": str(nvme_path), **config})
    with pytest.raises(swapper.ConfigError, match="checkpoint_format: 'directory' is not for SwapFSDPStrategy"):
        swapper.lightning.SwapFSDPStrategy({"nvme_path": str(nvme_path)}, checkpoint_format="directory")


def test_a_model_that_is_swapped_is_not_converted(nvme_path: Path, leaves_nothing: None) -> None:
    in_processes(lightning_sharded.convert, nvme_path)
