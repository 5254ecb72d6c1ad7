"""Gradients that are stored as bf16: the bits are those of a reference in plain torch that rounds as it is said."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import error_of
from encoded_state import rounded
from gradient_twins import (
    MakeOptimizer,
    Net,
    adamw,
    assert_same,
    batches,
    gradients_of,
    make_config,
    make_net,
    trained,
    wrapped,
)
from rounded_gradients import RoundedGradients
from still_drive import still
from torch import nn
from torch.optim import Optimizer
from training import MasterWeights, same_bits

import swapper
from swapper import SwapIOError
from swapper.config import OffloadConfig
from swapper.gradient.rounding import Rounding, decode_in_place
from swapper.io.bf16_codec import RoundingKey
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer.swapper import OptimizerSwapper
from swapper.tensors.evicted_gradients import raw_gradient

pytestmark = pytest.mark.usefixtures("leaves_nothing")

BF16 = {"device": "nvme", "encoding": "bf16"}

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": adamw,
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "foreach": lambda ps: torch.optim.Adam(ps, lr=1e-3, foreach=True),
    "Adafactor": lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()], lr=1e-2),  # It divides by numel.
}


def run_both(
    optimizer: Optimizer,
    swapped: Net,
    reference: RoundedGradients,
    plain: Net,
    handle: OptimizerSwapper,
    *,
    micro_batches: int,
    clip: float | None = None,
    steps: int = 4,
) -> None:
    plain_data, swapped_data = batches(torch.float32), batches(torch.float32)
    for step in range(steps):
        for _ in range(micro_batches):
            reference.backward(plain(next(plain_data)))
            swapped(next(swapped_data)).backward()
        if clip is not None:
            expected = torch.nn.utils.clip_grad_norm_(trained(plain), clip)
            assert same_bits(handle.clip_grad_norm_(clip), expected)
        if step == 2 and not reference.keeps:
            for p, mine in zip(trained(plain), trained(swapped), strict=True):
                assert (p.grad is None) == (mine.grad is None)
                assert p.grad is None or mine.grad is None or same_bits(mine.grad.contiguous(), p.grad.contiguous())
        reference.step()
        optimizer.step()
        reference.zero_grad()
        optimizer.zero_grad()
        assert_same(plain, swapped)


# --- Bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pool_bytes", ["6MiB", "64MiB"])
@pytest.mark.parametrize("bucket_bytes", ["64KiB", "256KiB", "1MiB"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_the_reference(
    nvme_path: Path,
    name: str,
    micro_batches: int,
    clip: float | None,
    bucket_bytes: str,
    pool_bytes: str,
    threads: int,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain, swapped = make_net(), make_net()
        optimizer = OPTIMIZERS[name](trained(swapped))
        reference = RoundedGradients(OPTIMIZERS[name](trained(plain)))
        sizes = {"bucket_bytes": bucket_bytes, "pool_bytes": "8MiB" if bucket_bytes == "1MiB" else pool_bytes}
        config = make_config(nvme_path, micro_batches, offload_gradient=BF16, **sizes)
        with wrapped(optimizer, config) as handle:
            run_both(optimizer, swapped, reference, plain, handle, micro_batches=micro_batches, clip=clip)
            assert any(gradient.rounds for gradient in gradients_of(optimizer)._gradients.values())
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("drives", [1, 2])
def test_bits_do_not_depend_on_drives(nvme_path: Path, drives: int, micro_batches: int) -> None:
    paths = [nvme_path / str(i) for i in range(drives)]
    for path in paths:
        path.mkdir()
    plain, swapped = make_net(), make_net()
    optimizer, reference = adamw(trained(swapped)), RoundedGradients(adamw(trained(plain)))
    config = make_config(nvme_path, micro_batches, offload_gradient=BF16, verify="crc32c")
    with wrapped(optimizer, config.model_copy(update={"nvme_path": paths})) as handle:
        run_both(optimizer, swapped, reference, plain, handle, micro_batches=micro_batches)
    for path in paths:
        path.rmdir()


@pytest.mark.long
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_is_stepped_in_backward_is_added_to_in_fp32(nvme_path: Path, micro_batches: int) -> None:
    plain, swapped = make_net(), make_net()
    optimizer = adamw(trained(swapped))
    reference = RoundedGradients(adamw(trained(plain)), keeps=micro_batches)
    state = {"device": "nvme", "step_in_backward": True}
    config = make_config(nvme_path, micro_batches, offload_gradient=BF16, offload_optimizer=state)
    # Without `sometimes`, which has fewer gradients than a window has passes.
    with wrapped(optimizer, config) as handle:
        for net in (plain, swapped):
            net.sometimes.requires_grad_(False)
        plain_data, swapped_data = batches(torch.float32), batches(torch.float32)
        for _ in range(3):
            for _ in range(micro_batches):
                reference.backward(plain(next(plain_data)))
                swapped(next(swapped_data)).backward()
            reference.step()
            optimizer.step()
            reference.zero_grad()
            optimizer.zero_grad()
            assert_same(plain, swapped)
        assert handle.stats().steps == 3


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_that_others_reduce_first(nvme_path: Path, micro_batches: int, clip: float | None) -> None:
    plain, swapped = make_net(), make_net()
    optimizer, reference = adamw(trained(swapped)), RoundedGradients(adamw(trained(plain)))
    with wrapped(optimizer, make_config(nvme_path, micro_batches, offload_gradient=BF16)) as handle:
        # All that is in memory goes when a backward is over: also what the pass had no gradient of, once more. That
        # changes nothing, for it is bf16 already, but the number of its next rounding.
        for net in (plain, swapped):
            net.sometimes.requires_grad_(False)
        run_both(optimizer, swapped, reference, plain, handle, micro_batches=micro_batches, clip=clip)


@pytest.mark.parametrize("masters", [False, True], ids=["", "masters"])
def test_gradients_in_bf16_stay_exact(nvme_path: Path, masters: bool) -> None:
    dtype = torch.bfloat16
    plain, swapped = make_net(dtype), make_net(dtype)
    reference: Any = MasterWeights(trained(plain), adamw) if masters else adamw(trained(plain))
    optimizer = adamw(trained(swapped))
    state = {"device": "nvme", "master_weights": masters}
    with wrapped(optimizer, make_config(nvme_path, 2, offload_gradient=BF16, offload_optimizer=state)):
        plain_data, swapped_data = batches(dtype), batches(dtype)
        for _ in range(3):
            for _ in range(2):
                plain(next(plain_data)).backward()
                swapped(next(swapped_data)).backward()
            reference.step()
            optimizer.step()
            (plain if masters else reference).zero_grad()
            optimizer.zero_grad()
            assert_same(plain, swapped)


def test_a_bucket_size_that_changes_between_backward_and_step_changes_no_bit(nvme_path: Path) -> None:
    """A new parameter has gradients cut anew, of which some wait to be clipped."""
    plain, swapped = make_net(), make_net()
    extra = [nn.Parameter(torch.ones(64, 70_000 // 64)) for _ in range(2)]
    optimizer, reference = adamw(trained(swapped)), RoundedGradients(adamw(trained(plain)))
    with wrapped(optimizer, make_config(nvme_path, offload_gradient=BF16)) as handle:
        x = next(batches(torch.float32))
        reference.backward(plain(x))
        swapped(x).backward()
        torch.nn.utils.clip_grad_norm_(trained(plain), 0.3)
        handle.clip_grad_norm_(0.3)
        gradients = gradients_of(optimizer)
        parts = [(bucket, p, start, stop) for bucket, p, start, stop in handle._plan.gradient_parts()]
        halves = [
            cut
            for bucket, p, start, stop in parts
            for middle in [start + (stop - start) // 3]
            for cut in ((2 * bucket, p, start, middle), (2 * bucket + 1, p, middle, stop))
            if cut[2] < cut[3]
        ]
        gradients.plan(halves)
        assert any(len(gradient.parts) > 1 and gradient.changes for gradient in gradients._gradients.values())
        gradients.plan(parts)
        optimizer.add_param_group({"params": [extra[0]]})
        reference.optimizer.add_param_group({"params": [extra[1]]})
        optimizer.step()
        reference.step()
        assert_same(plain, swapped)


def test_a_model_on_an_accelerator(nvme_path: Path, device: str) -> None:
    found = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(70, 300).to(where))
        q = nn.Parameter(torch.randn(300, 90).to(where))
        optimizer = torch.optim.SGD([p, q], lr=0.1, momentum=0.9)
        with wrapped(optimizer, make_config(nvme_path, 2, offload_gradient=BF16)) as handle:
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                # Before both passes, as these copies wait for the device: the second is to find the first under way.
                factors = [[torch.randn(each.shape, generator=generator).to(where) for each in (p, q)] for _ in "12"]
                for of_p, of_q in factors:
                    ((p * of_p).sum() + (q * of_q).sum()).backward()
                if step == 1:
                    handle.clip_grad_value_(0.7)
                optimizer.step()
                optimizer.zero_grad()
            assert handle.stats().gradients.bytes_written > 0
            found.append([each.detach().cpu() for each in (p, q)])
    for mine, theirs in zip(*found, strict=True):
        assert same_bits(mine, theirs)


def test_the_mean_of_the_rounded_is_the_value(nvme_path: Path) -> None:
    """Of a sum of three passes, too, whose roundings must not depend on each other."""
    numel = 40_000
    p = nn.Parameter(torch.zeros(numel))
    optimizer = torch.optim.SGD([p], lr=1.0)
    value = 1.0 + 2.0**-9 + 2.0**-11  # Between two neighbours, 2**-7 apart.
    with wrapped(optimizer, make_config(nvme_path, 3, offload_gradient=BF16)):
        for passes in (1, 3):
            for _ in range(passes):
                (p * value).sum().backward()
            assert raw_gradient(p) is None and p.grad is not None
            mean = p.grad.double().mean().item()
            spacing = 2.0**-7 if passes == 1 else 2.0**-6
            # Each rounding has a variance of at most a quarter of the spacing's square.
            bound = 5 * (passes * spacing**2 / 4 / numel) ** 0.5
            assert abs(mean - passes * value) < bound
            assert len(p.grad.unique()) > 1
            optimizer.zero_grad()


def test_what_is_not_finite_stays(nvme_path: Path) -> None:
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.0, torch.finfo(torch.float32).max])
    weights = special.repeat(1000)
    p = nn.Parameter(torch.ones(len(weights)))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with wrapped(optimizer, make_config(nvme_path, offload_gradient=BF16)):
        p.register_hook(lambda _: weights.clone())
        p.sum().backward()
        assert raw_gradient(p) is None and p.grad is not None
        got = p.grad.view(1000, -1)
        assert same_bits(got[:, :6].nan_to_num(7.0), weights.view(1000, -1)[:, :6].nan_to_num(7.0))
        assert got[:, 6].isfinite().all()


def test_small_gradients_and_those_that_were_in_memory_are_exact(nvme_path: Path) -> None:
    small, held = nn.Parameter(torch.ones(4095)), nn.Parameter(torch.ones(8192))
    optimizer = torch.optim.SGD([small, held], lr=1.0)
    with wrapped(optimizer, make_config(nvme_path, offload_gradient=BF16)):
        held.grad = torch.zeros(8192)
        value = 1.0 + 2.0**-20
        ((small + 0) * value).sum().backward()
        ((held + 0) * value).sum().backward()
        for p in (small, held):
            assert raw_gradient(p) is not None and torch.equal(p.grad, torch.full_like(p, value))  # type: ignore[arg-type]


@pytest.mark.parametrize("numel", [1, 255, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 1_000_003])
def test_in_place_is_as_beside(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    rounding = Rounding(RoundingKey("gradient.1", 3, 2), 17, 4096)
    memory = values.clone()
    assert rounding.encode_in_place(memory) == 4096
    decode_in_place(memory)
    assert same_bits(memory, rounded(values, 17, rounding.key))


# --- Bytes -----------------------------------------------------------------------------------------------------------


def test_half_the_bytes_move_and_check_says_so(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved, reports = {}, {}
    for encoding in ("exact", "bf16"):
        model = nn.Linear(512, 512, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        gradient = {"device": "nvme", "encoding": encoding}
        config = make_config(nvme_path, 2, offload_gradient=gradient, pool_bytes="32MiB", bucket_bytes="4MiB")
        reports[encoding] = swapper.check(model, optimizer, config)
        with wrapped(optimizer, config) as handle:
            for _ in range(2):
                model(torch.ones(1, 512)).sum().backward()
                handle.flush()
            optimizer.step()
            counts = handle.stats().gradients
            moved[encoding] = counts.bytes_written, counts.bytes_read
    numel = 512 * 512
    assert moved == {"exact": (8 * numel, 8 * numel), "bf16": (4 * numel, 4 * numel)}  # Of two passes, and one step.
    exact, encoded = reports["exact"], reports["bf16"]
    assert (exact.gradient_bytes, encoded.gradient_bytes) == (4 * numel, 2 * numel)
    assert (exact.rounded_gradient_numel, encoded.rounded_gradient_numel) == (0, numel)
    assert exact.step_written_bytes - encoded.step_written_bytes == 4 * numel
    assert exact.step_read_bytes - encoded.step_read_bytes == 4 * numel
    assert exact.disk_bytes - encoded.disk_bytes == 2 * numel
    assert exact.pool_needed_bytes == encoded.pool_needed_bytes
    said = [line for line in capsys.readouterr().out.splitlines() if "rounded to bf16" in line]
    assert len(said) == 1 and f"{numel:,} values" in said[0]


def test_files_are_half_as_long(nvme_path: Path) -> None:
    p = nn.Parameter(torch.zeros(100_000))
    lengths = []
    for encoding in ("exact", "bf16"):
        optimizer = torch.optim.SGD([p], lr=0.1)
        config = make_config(nvme_path, offload_gradient={"device": "nvme", "encoding": encoding})
        with wrapped(optimizer, config) as handle:
            p.sum().backward()
            handle.flush()
            lengths.append(sum(path.stat().st_size for path in nvme_path.rglob("*grad*") if path.is_file()))
            optimizer.zero_grad()
    assert lengths[1] and abs(lengths[0] / lengths[1] - 2) < 0.1


# --- Runs that end, and begin again ----------------------------------------------------------------------------------


def train(model: Net, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for turn in range(2):
            model.count = 0
            model(next(batches(torch.float32, 100 * step + turn))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("case", ["exact, state_dict", "exact, checkpoint", "bf16, checkpoint", "packed, checkpoint"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(nvme_path: Path, tmp_path: Path, case: str) -> None:
    encoding, way = case.split(", ")
    state = {"device": "nvme", "encoding": encoding}
    config = functools.partial(make_config, nvme_path, 2, offload_gradient=BF16, offload_optimizer=state)
    whole = make_net()
    optimizer = adamw(trained(whole))
    with wrapped(optimizer, config()):
        train(whole, optimizer, range(2))
        if way == "checkpoint":
            swapper.save_checkpoint(tmp_path / "saved", whole, optimizer)
        else:
            saved = {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
            assert saved["optimizer"]["swapper_encoded_steps"] == 2
            torch.save(saved, tmp_path / "saved.pt")
        train(whole, optimizer, range(2, 4))
    resumed = make_net()
    optimizer = adamw(trained(resumed))
    with wrapped(optimizer, config(bucket_bytes="128KiB")):
        train(resumed, optimizer, range(1))
        if way == "checkpoint":
            swapper.load_checkpoint(tmp_path / "saved", resumed, optimizer)
        else:
            saved = torch.load(tmp_path / "saved.pt")
            resumed.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train(resumed, optimizer, range(2, 4))
    assert_same(whole, resumed)


def test_an_exact_run_says_no_number_of_steps(nvme_path: Path) -> None:
    optimizer = adamw(trained(make_net()))
    with wrapped(optimizer, make_config(nvme_path)):
        assert "swapper_encoded_steps" not in optimizer.state_dict()


def test_a_skipped_step_and_zero_grad_begin_anew(nvme_path: Path) -> None:
    """As after a skipped step of `GradScaler`: a run that is resumed there knows nothing of the gradients that went."""
    p, other = nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(20_000))
    weights = torch.randn(20_000, generator=torch.Generator().manual_seed(3))
    found = []
    for each, skips in ((p, False), (other, True)):
        optimizer = torch.optim.SGD([each], lr=1.0)
        with wrapped(optimizer, make_config(nvme_path, offload_gradient=BF16)):
            if skips:
                (each * weights).sum().backward()
                optimizer.zero_grad()
            (each * weights).sum().backward()
            optimizer.step()
        found.append(each.detach())
    assert same_bits(*found)


# --- Failures --------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_late_is_raised_until_the_gradient_is_cleared(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
    first, last = (nn.Parameter(torch.ones(8192)) for _ in range(2))
    optimizer = torch.optim.SGD([first, last], lr=0.5)
    with wrapped(optimizer, make_config(nvme_path, offload_gradient=BF16)) as handle:
        faults.fail_write_at, faults.fail_errno = 1, errno.ENOSPC
        with still(faults):
            (first * 2).sum().backward()
        for use in (handle.flush, optimizer.step, lambda: handle.clip_grad_norm_(1.0), lambda: first.grad.sum()):  # type: ignore[union-attr]
            with pytest.raises(SwapIOError, match="grad"):
                use()
        assert torch.equal(first.detach(), torch.ones(8192))
        first.grad = None
        (last * 2).sum().backward()
        optimizer.step()
        assert torch.equal(first.detach(), torch.ones(8192)) and torch.equal(last.detach(), torch.zeros(8192))


def test_a_gradient_that_cannot_be_read_is_whole_when_it_is_read_again(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
    plain, swapped = make_net(), make_net()
    optimizer, reference = adamw(trained(swapped)), RoundedGradients(adamw(trained(plain)))
    with wrapped(optimizer, make_config(nvme_path, offload_gradient=BF16)) as handle:
        x = next(batches(torch.float32))
        reference.backward(plain(x))
        swapped(x).backward()
        handle.flush()
        faults.fail_read_at = 2
        with contextlib.suppress(SwapIOError):
            for p in trained(swapped):
                if p.grad is not None:
                    p.grad.sum()
        reference.step()
        optimizer.step()
        assert_same(plain, swapped)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_without_a_drive_it_is_refused(nvme_path: Path, device: str) -> None:
    said = error_of(lambda: OffloadConfig(nvme_path=nvme_path, offload_gradient={"device": device, "encoding": "bf16"}))
    assert "offload_gradient.encoding: bf16" in said and "device: nvme" in said


def test_other_encodings_are_refused(nvme_path: Path) -> None:
    said = error_of(lambda: OffloadConfig(nvme_path=nvme_path, offload_gradient={"device": "nvme", "encoding": "int8"}))
    assert "offload_gradient.encoding" in said and "bf16" in said


def test_random_bits_differ_by_pass_step_and_parameter() -> None:
    values = np.full(4096, 1.0 + 2.0**-9, dtype=np.float32)
    keys = [RoundingKey(f"gradient.{n}", step, number) for n in (1, 2) for step in (0, 1) for number in (0, 1)]
    results = {rounded(torch.from_numpy(values.copy()), 0, key).numpy().tobytes() for key in keys}
    assert len(results) == len(keys)
