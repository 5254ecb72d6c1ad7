"""Parameters on an accelerator that come from the drive without the pool, by cuFile: a mock, see `mock_cufile`."""

from __future__ import annotations

import errno
import gc
import importlib
import logging
from pathlib import Path

import pytest
import torch
from interrupts import interrupted_at
from mock_cufile import COMPILER, Mock
from models import CASES
from sampling import places
from torch import nn
from training import same_bits
from twins import Run, models_on, run_twice, small_records, swapper_of

import swapper
from swapper.errors import SwapIOError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the mock library")

WIDE = 64


@pytest.fixture
def device(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


def layers(device: torch.device, depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(depth))).to(device)


def config_for(nvme_path: Path | list[Path], **settings: object) -> swapper.OffloadConfig:
    values: dict[str, object] = {
        "nvme_path": nvme_path,
        "pool_bytes": "1MiB",
        "bucket_bytes": "16KiB",
        "offload_optimizer": {"device": "nvme", "step_device": "device"},
        "offload_param": {"device": "nvme"},
    }
    return swapper.OffloadConfig(**(values | settings))  # type: ignore[arg-type]


class Trained:
    """A model of which the pool has nothing, beside the same one, plain."""

    def __init__(self, nvme_path: Path | list[Path], device: torch.device, **settings: object) -> None:
        self.device = device
        self.plain, self.model = layers(device), layers(device)
        with small_records():
            swapper.offload(self.model, config=config_for(nvme_path, **settings))
        self.swapper = swapper_of(self.model)
        self.empty_pool()

    def empty_pool(self) -> None:
        while self.swapper._pool.reclaim():
            pass
        assert self.swapper._pool.used_bytes == 0

    def evaluated(self, model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        with torch.inference_mode():
            return model(torch.randn(4, WIDE, generator=generator).to(self.device))  # type: ignore[no-any-return]

    def check(self) -> None:
        assert same_bits(self.evaluated(self.model), self.evaluated(self.plain))

    def close(self) -> None:
        """Nothing is left in use."""
        self.swapper.flush()
        assert not any(held.pinned or held.holds or held.attached for held in self.swapper._all)
        self.swapper.close(keep_values=True)
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert same_bits(p.cpu(), q.cpu())


# --- To the bit, and past the pool ---


@pytest.mark.parametrize("drives", [1, 2])
def test_what_is_read_does_not_pass_the_pool(direct: Mock, nvme_path: Path, device: torch.device, drives: int) -> None:
    paths = [nvme_path / str(number) for number in range(drives)]
    for path in paths:
        path.mkdir()
    trained = Trained(paths, device)
    before = trained.swapper.metrics.bytes_read
    direct["bytes_read"] = direct["reads"] = direct["writes"] = 0
    for _ in range(3):
        trained.check()
    assert trained.swapper._pool.used_bytes == 0
    assert direct["bytes_read"] == trained.swapper.metrics.bytes_read - before > 0
    assert direct["in_registered_memory"] == direct["reads"] + direct["writes"] > 0 == direct["unaligned"]
    trained.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["mlp", "odd shapes", "gpt2 tied", "used twice", "changing order", "lora", "bags", "strided", "frozen"]
)
@pytest.mark.parametrize("step_device", ["cpu", "device"])
def test_models_train_and_evaluate_to_the_same_bits(
    direct: Mock, name: str, step_device: str, nvme_path: Path, device: torch.device
) -> None:
    case = CASES[name]

    def program(run: Run) -> None:
        for _ in range(2):
            (run.model(*case.inputs(run.generator)).float().square().mean()).backward()
            run.finish_step()
        run.model.eval()
        with torch.inference_mode():
            run.note("evaluated", run.model(*case.inputs(run.generator)))

    with models_on(device, roomy=True, step_device=step_device):
        run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, watch=False)
    assert direct["bytes_read"] > 0


# --- Where it is not used ---


@pytest.mark.parametrize(
    ("why", "settings", "reason"),
    [
        ("off", {"aio": {"gds": "off"}}, "aio.gds is off"),
        ("driver", {}, "cuFileDriverOpen"),
        ("file", {}, "cuFile error 5007"),
        ("few bytes", {"offload_param": {"device": "nvme", "device_bytes": 150_000}}, "set it to at least"),
        ("verified", {"verify": "crc32c"}, "takes checksums of records on the host"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 10 else "",
)
def test_the_reason_is_logged_once_and_all_runs_as_without(
    direct: Mock,
    why: str,
    settings: dict[str, object],
    reason: str,
    nvme_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    importlib.import_module("swapper.check")._say_once.cache_clear()
    direct["open_error" if why == "driver" else "register_error"] = {"driver": 5033, "file": 5007}.get(why, 0)
    with caplog.at_level(logging.INFO, "swapper"):
        for _ in range(2):
            trained = Trained(nvme_path, device, **settings)
            trained.check()
            trained.close()
    (message,) = [record.getMessage() for record in caplog.records if "through the pool" in record.getMessage()]
    assert reason in message
    assert direct["bytes_read"] in (0, 64 << 10)  # What was tried.
    direct["open_error"] = 0


# --- Faults ---


@pytest.mark.parametrize("how", ["errno", "end of file"])
def test_a_read_that_fails_is_an_error_and_the_next_pass_is_right(
    direct: Mock, nvme_path: Path, device: torch.device, how: str
) -> None:
    trained = Trained(nvme_path, device)
    failed = 0
    if how == "errno":
        direct["errno"] = errno.EIO
    for n in (1, 2, 3, 5):
        direct["fail_at"] = n if how == "errno" else -1
        cut = trained.swapper.store.directories[0] / trained.swapper._all[n].key.file_name
        content = cut.read_bytes()
        if how != "errno":
            cut.write_bytes(content[:4096])
        try:
            trained.evaluated(trained.model)
        except SwapIOError as error:
            assert error.errno == errno.EIO if how == "errno" else errno.ENODATA
            failed += 1
        direct["fail_at"] = -1
        cut.write_bytes(content)
        trained.check()
    assert failed > 0  # What is read ahead is read again when it is needed.
    trained.close()


def test_short_reads_are_completed(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    trained = Trained(nvme_path, device)
    direct["short"] = 4096
    trained.check()
    trained.close()


def test_what_cufile_refuses_in_the_middle_goes_through_the_host(
    direct: Mock, nvme_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(nvme_path, device)
    direct["result"] = -5008  # Every call from now on.
    trained.check()
    assert sum("memory of the host" in record.getMessage() for record in caplog.records) == 1
    direct["result"] = 0
    trained.check()
    trained.close()


def test_ctrl_c_in_a_pass(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    trained = Trained(nvme_path, device)
    trained.check()
    before = torch.accelerator.memory_allocated(device)
    for at in places(5, 60):
        if not interrupted_at(at, lambda: trained.evaluated(trained.model), "parameter/di", "parameter/device_"):
            break
        gc.collect()
        trained.check()
        assert torch.accelerator.memory_allocated(device) <= before + 2000, at
    trained.close()


def test_device_memory_is_what_was_said(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    torch.accelerator.synchronize()
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    trained = Trained(nvme_path, device)
    report = swapper.check(layers(device), config=config_for(nvme_path))
    trained.check()
    assert trained.swapper._tier is not None and trained.swapper._tier.direct is not None
    plain_bytes = sum(p.nbytes for p in trained.plain.parameters())
    torch.accelerator.reset_peak_memory_stats(device)
    trained.check()
    peak = torch.accelerator.max_memory_allocated(device) - before - plain_bytes
    assert report.device_bytes > 3 * 16 << 10
    assert peak <= report.device_bytes + (64 << 10) + 16384  # Alignment of the staging memory, and activations.
    trained.close()
