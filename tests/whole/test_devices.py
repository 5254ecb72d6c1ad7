"""Parameters on a device: gradients come to the pool on a stream of their own, parameters go back the same way.

And device tensors to and from files, through memory of the host and by cuFile. See `accelerators` for the devices.
"""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerators import keep_busy
from gpt import GPT, Shape
from torch import nn
from training import OPTIMIZERS, make_config, same_bits

import swapper
from swapper.errors import SwapError, SwapIOError
from swapper.io import gds
from swapper.io.gds import GDSHandle, probe_cufile
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage.cache import RecordCache
from swapper.tensors.evicted_gradients import raw_gradient


class OnTheHost:
    """The reference, written out: the optimizer steps copies on the host, the model gets them back."""

    def __init__(self, parameters: list[nn.Parameter], name: str, masters: bool) -> None:
        self.parameters = parameters
        self.copies = [nn.Parameter(p.detach().cpu().float() if masters else p.detach().cpu()) for p in parameters]
        self.optimizer = OPTIMIZERS[name](self.copies)

    def step(self) -> None:
        for p, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None if p.grad is None else p.grad.cpu().to(copy.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for p, copy in zip(self.parameters, self.copies, strict=True):
                p.copy_(copy.to(p.dtype))


def train(model: GPT, step: object, device: str, steps: int = 5) -> list[float]:
    assert callable(step)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(256, (2, 33), generator=generator).to(device)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def make_model(device: str, dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(Shape(layers=2, heads=4, width=64, context=64)).to(device, dtype)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)  # It also fills what `torch.empty` makes, of other tests too.


@pytest.mark.sampled(6)
@pytest.mark.parametrize("state", ["nvme", "cpu"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "Muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-masters"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_same_bits_as_stepping_on_the_host(device: str, nvme_path: Path, name: str, precision: str, state: str) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    masters = precision == "bf16-masters"
    plain, swapped = make_model(device, dtype), make_model(device, dtype)
    expected = train(plain, OnTheHost(list(plain.parameters()), name, masters).step, device)
    optimizer = OPTIMIZERS[name](list(swapped.parameters()))
    swapper.wrap_optimizer(optimizer, make_config(nvme_path, device=state, master_weights=masters, step_device="cpu"))
    assert train(swapped, optimizer.step, device) == expected
    assert all(same_bits(p.cpu(), q.cpu()) for p, q in zip(plain.parameters(), swapped.parameters(), strict=True))
    assert all(p.device.type == device for p in swapped.parameters())
    swapper.of(optimizer).close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("state", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("gradients", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("parameters", ["nvme", "none"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_native_steps_on_the_host(device: str, nvme_path: Path, state: str, gradients: str, parameters: str) -> None:
    """The class is given no tensor of the user's there: only what the host has of it counts."""
    if state == gradients == "none":
        pytest.skip("stepped on the device")
    results = []
    for native in ("off", "on"):
        model = make_model(device, torch.float32)
        optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
        config = swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="32MiB",
            bucket_bytes="1MiB",
            offload_optimizer={"device": state, "step_device": "cpu", "native_step": native},
            offload_gradient={"device": gradients},
            offload_param={"device": parameters},
        )
        swapper.offload(model, optimizer, config)
        losses = train(model, optimizer.step, device)
        assert (swapper.of(optimizer).stats().segments_native > 0) == (native == "on")
        results.append((losses, [p.detach().cpu() for p in model.parameters()]))
        swapper.of(optimizer).close()
    (expected_losses, expected), (losses, values) = results
    assert losses == expected_losses
    assert all(same_bits(p, q) for p, q in zip(values, expected, strict=True))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("where", ["nvme", "cpu"])
@pytest.mark.parametrize("state", ["nvme", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-masters"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_leave_the_device(
    device: str, nvme_path: Path, precision: str, state: str, where: str, micro_batches: int
) -> None:
    """Added up, clipped and stepped with the bits of gradients that stay on it."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    results = []
    for gradients in ("none", where):
        model = make_model(device, dtype)
        parameters = list(model.parameters())
        optimizer = OPTIMIZERS["AdamW"](parameters)
        config = swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="32MiB",
            bucket_bytes="1MiB",
            gradient_accumulation_steps=micro_batches,
            offload_optimizer={"device": state, "master_weights": precision != "fp32"},
            offload_gradient={"device": gradients},
        )
        swapper.wrap_optimizer(optimizer, config)
        generator = torch.Generator().manual_seed(1)
        norms = []
        for step in range(4):
            for _ in range(micro_batches):
                tokens = torch.randint(256, (2, 33), generator=generator).to(device)
                model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            large = [p for p in parameters if p.nbytes >= 16 << 10]
            assert large and all((raw_gradient(p) is None) == (gradients != "none") for p in large)
            if step % 2:
                norms.append(swapper.of(optimizer).clip_grad_norm_(0.1).cpu())
            if step == 3:
                norms += [p.grad.cpu() for p in parameters if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        results.append(([p.detach().cpu() for p in parameters], norms))
        swapper.of(optimizer).close()
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert all(same_bits(p, q) for p, q in zip(mine, theirs, strict=True))


def test_a_pool_that_cannot_hold_all_gradients_is_refused(device: str, nvme_path: Path) -> None:
    model = nn.Linear(1000, 1000, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="4MiB",
        bucket_bytes="256KiB",
        offload_optimizer={"device": "nvme"},
        offload_gradient={"device": "cpu"},
    )
    with pytest.raises(swapper.ConfigError, match="all of them, which device: cpu keeps in the pool"):
        swapper.wrap_optimizer(optimizer, config)


def late_model(device: str, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(layers)]).to(device)


def small_config(path: Path, **settings: object) -> swapper.OffloadConfig:
    kinds = {"pool_bytes": "32MiB", "bucket_bytes": "1MiB", "offload_optimizer": {"device": "nvme"}, **settings}
    return swapper.OffloadConfig(nvme_path=path, **kinds)


@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_temporaries_are_copied_when_they_are_made(device: str, nvme_path: Path, what: str) -> None:
    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        base, gradient = torch.randn(1000, 2000), torch.randn(1000, 1000)
        base, gradient = (base.to(device), gradient.to(device)) if swap else (base, gradient)
        p = nn.Parameter(base[:, :1000] if what == "parameter" else base[:, :1000].clone())
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        if swap:
            swapper.wrap_optimizer(optimizer, small_config(nvme_path))
            keep_busy(device, 70_000)
        p.grad = gradient.t() if what == "gradient" else gradient
        optimizer.step()
        results.append(p.detach().cpu())
        if swap:
            swapper.of(optimizer).close()
    assert same_bits(*results)


def test_what_comes_after_a_step_that_failed_is_not_overwritten(
    device: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = late_model(device, 8)
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), small_config(nvme_path))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    calls = 0
    put = RecordCache.put

    def failing(self: RecordCache, *args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise SwapIOError(errno.ENOSPC, "write", "it fails")
        put(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(RecordCache, "put", failing)
        with pytest.raises(SwapIOError, match="it fails"):
            optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    pool = swapper.of(optimizer)._pool
    leases = []
    while (lease := pool.try_acquire(64 << 10)) is not None:
        lease.tensor.fill_(7)
        leases.append(lease)
    torch.accelerator.synchronize()
    assert all(bool((p == 7.0).all()) for p in model.parameters())
    assert all(bool((lease.tensor == 7).all()) for lease in leases)
    for lease in leases:
        lease.release()
    swapper.of(optimizer).close()


def test_a_parameter_that_is_read_after_backward_is_whole(device: str, nvme_path: Path) -> None:
    model = late_model(device)
    settings = small_config(nvme_path, offload_optimizer={"device": "nvme", "step_in_backward": True})
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), settings)
    for _ in range(3):
        model(torch.ones(2, 512, device=device)).square().sum().backward()
        between = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        assert all(same_bits(p.detach().cpu(), q.cpu()) for p, q in zip(model.parameters(), between, strict=True))
    swapper.of(optimizer).close()


@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_gradients_leave_while_the_device_is_busy(device: str, nvme_path: Path, where: str) -> None:
    """The host is back from backward before the device has begun with it, so nothing in it has waited for a copy."""
    model = late_model(device)
    optimizer = swapper.wrap_optimizer(
        torch.optim.AdamW(model.parameters()), small_config(nvme_path, offload_gradient={"device": where})
    )
    for _ in range(2):  # Everything is made and loaded.
        model(torch.ones(2, 512, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(torch.ones(2, 512, device=device)).square().sum()
    torch.accelerator.synchronize()
    keep_busy(device, 1_300_000)
    busy = torch.Event(device)
    busy.record()
    loss.backward()
    assert not busy.query()
    assert all(raw_gradient(p) is None for p in model.parameters() if p.nbytes >= 16 << 10)
    optimizer.step()
    swapper.of(optimizer).close()


def test_a_pool_that_a_cpu_optimizer_made_is_locked_for_the_gpu(device: str, nvme_path: Path) -> None:
    settings = small_config(nvme_path)
    first = swapper.wrap_optimizer(torch.optim.AdamW(nn.Linear(300, 300).parameters()), settings)
    pool = swapper.of(first)._pool
    assert not pool._memory.is_pinned()
    second = swapper.wrap_optimizer(torch.optim.AdamW(late_model(device).parameters()), settings)
    assert swapper.of(second)._pool is pool and pool._memory.is_pinned()
    swapper.of(second).close()
    swapper.of(first).close()


def test_state_never_visits_the_device_if_the_step_is_on_the_cpu(device: str, nvme_path: Path) -> None:
    model = nn.Linear(2000, 2000, device=device)
    settings = make_config(nvme_path, step_device="cpu")
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), settings)
    model(torch.randn(2, 2000, device=device)).square().sum().backward()
    torch.accelerator.synchronize()
    before = torch.accelerator.max_memory_allocated()
    optimizer.step()
    torch.accelerator.synchronize()
    assert torch.accelerator.max_memory_allocated() == before
    state = optimizer.state_dict()["state"][0]
    assert state["exp_avg"].is_cpu
    swapper.of(optimizer).close()


def test_a_scaler_on_the_gpu(device: str, nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300, device=device)
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True), make_config(nvme_path))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
    before = model.weight.detach().clone()
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.randn(4, 300, device=device)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert model.weight.isfinite().all() and not torch.equal(model.weight, before)
    assert swapper.of(optimizer).state(model.weight)["step"] == 2
    swapper.of(optimizer).close()


@pytest.mark.parametrize("what", ["forward", "backward", "step", "step in backward"])
def test_a_graph_that_is_being_captured_is_refused(
    device: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Before anything has changed: the same call works afterwards. What CUDA itself would say looks like a failure."""
    in_backward = what == "step in backward"
    kinds = {
        "offload_optimizer": {"device": "nvme", "step_in_backward": in_backward},
        "offload_gradient": {"device": "none" if in_backward else "nvme"},
        "offload_param": {"device": "nvme"},
    }
    model = late_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    swapper.offload(model, optimizer, small_config(nvme_path, **kinds))
    x = torch.ones(2, 512, device=device)
    calls = {
        "forward": lambda: model(x),
        "backward": lambda: losses[-1].backward(),
        "step": optimizer.step,
    }
    losses: list[torch.Tensor] = []
    module = torch.get_device_module(device)
    for part in ("forward", "backward", "step"):
        if part == what.rpartition(" ")[2] or (part == "backward" and in_backward):
            with monkeypatch.context() as patch:
                patch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
                with pytest.raises(SwapError, match="CUDA graph is being captured"):
                    calls[part]()
            if part == "backward":
                optimizer.zero_grad()
                losses.append(model(x).square().sum())
        result = calls[part]()
        if part == "forward":
            losses.append(result.square().sum())
    assert all(p.isfinite().all() for p in model.parameters())
    swapper.of(optimizer).close()
    model.swapper.close()  # type: ignore[operator, union-attr]


def test_unwrap_puts_the_state_on_the_device(device: str, nvme_path: Path) -> None:
    model = nn.Linear(300, 300, device=device)
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), make_config(nvme_path))
    for _ in range(2):
        model(torch.randn(2, 300, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "swapper"):
            swapper.unwrap_optimizer(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].device.type == device


# --- Device tensors to and from files -------------------------------------------------------------------------------

CHUNK = 4 << 20
LENGTHS = (0, 1, 511, 4096, 4097, (1 << 20) + 1, CHUNK - 1, CHUNK, 9 * CHUNK + 13)


@pytest.fixture(params=[0, 1])
def numbered(request: pytest.FixtureRequest, device: str) -> str:
    if request.param >= torch.accelerator.device_count():
        pytest.skip(f"needs {request.param + 1} devices")
    return f"{device}:{request.param}"


@pytest.fixture(params=["aio", "gds", pytest.param("gds-compat", marks=pytest.mark.cuda)])
def handle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AsyncIOHandle]:
    """The last is cuFile itself on any machine that has the library, however it moves the bytes."""
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", str(tmp_path / "cufile.log"))
    if request.param == "gds-compat":
        monkeypatch.setenv(gds.COMPATIBILITY_VARIABLE, "1")
        if not probe_cufile().available:
            pytest.skip(f"no cuFile: {probe_cufile().reason}")
    make = AsyncIOHandle if request.param == "aio" else GDSHandle
    with make(block_bytes=1 << 20, queue_depth=8) as handle:
        yield handle


def random_bytes(length: int, device: str, seed: int = 0) -> torch.Tensor:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.to(device)


@pytest.mark.long
@pytest.mark.sampled(20)
@pytest.mark.parametrize("size", LENGTHS)
def test_written_bytes_are_read_back(handle: AsyncIOHandle, nvme_path: Path, size: int, numbered: str) -> None:
    path = nvme_path / "file"
    for offset, misalignment in ((0, 0), (4096, 64), (1, 1), (5000, 904), ((5 << 30) + 77, 3)):
        source = torch.empty(size + 1000, dtype=torch.uint8, device=numbered)[misalignment : misalignment + size]
        source.copy_(random_bytes(size, numbered, offset % 1000))
        memory = torch.zeros(size + 2000, dtype=torch.uint8, device=numbered)
        target = memory[misalignment : misalignment + size]
        with handle.open(path, "rw", truncate=True) as file:
            assert handle.write(file, source, offset).wait() == size
            assert file.size_bytes() == (offset + size if size else 0)
            assert handle.read(file, target, offset).wait() == size
        assert torch.equal(source, target)
        assert int(memory.long().sum()) == int(target.long().sum())
        with path.open("rb") as plain:
            plain.seek(offset)
            assert plain.read() == source.cpu().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_of_device_tensors(device: str, handle: AsyncIOHandle, nvme_path: Path, dtype: torch.dtype) -> None:
    source = torch.randn(300, 655, device=device).mul(3).to(dtype)
    target = torch.zeros_like(source)
    with handle.open(nvme_path / "file", "rw") as file:
        handle.write(file, source).wait()
        handle.read(file, target).wait()
    assert torch.equal(source, target)


def test_transfers_wait_for_the_current_stream(handle: AsyncIOHandle, nvme_path: Path, numbered: str) -> None:
    device = numbered.partition(":")[0]
    stream = torch.Stream(numbered)
    source = torch.zeros(9 * CHUNK, dtype=torch.uint8, device=numbered)
    torch.accelerator.synchronize(numbered)
    with handle.open(nvme_path / "file", "rw") as file, stream:
        keep_busy(device, 200_000)
        source.fill_(7)
        handle.write(file, source).wait()
        assert (nvme_path / "file").read_bytes() == b"\7" * source.numel()
        source.fill_(1)
        keep_busy(device, 200_000)
        used = source.clone()
        handle.read(file, source).wait()
        assert bool(used.eq(1).all()) and bool(source.eq(7).all())


def test_what_is_read_is_there_for_every_stream(device: str, handle: AsyncIOHandle, nvme_path: Path) -> None:
    data = random_bytes(9 * CHUNK, device)
    others = [torch.Stream(device) for _ in range(4)]
    with handle.open(nvme_path / "file", "rw") as file:
        handle.write(file, data).wait()
        for stream in others:
            target = torch.zeros_like(data)
            torch.accelerator.synchronize()
            handle.read(file, target).wait()
            with stream:
                assert torch.equal(target, data)


def test_no_device_memory_is_allocated(device: str, handle: AsyncIOHandle, nvme_path: Path) -> None:
    data = random_bytes(9 * CHUNK + 5, device)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with handle.open(nvme_path / "file", "rw") as file:
        handle.write(file, data, 3).wait()
        handle.read(file, data, 3).wait()
    assert torch.accelerator.max_memory_allocated() == before


@pytest.mark.long
@pytest.mark.sampled(3)
def test_dropped_tensors_are_kept_until_their_transfer_is_over(
    device: str, handle: AsyncIOHandle, nvme_path: Path
) -> None:
    expected = [random_bytes(3 * CHUNK, "cpu", seed).numpy().tobytes() for seed in range(6)]
    with handle.open(nvme_path / "file", "rw") as file:
        for seed in range(6):
            handle.write(file, random_bytes(3 * CHUNK, device, seed), seed * 3 * CHUNK)
            gc.collect()
            torch.full((3 * CHUNK,), 255, dtype=torch.uint8, device=device)
        while handle.in_flight:
            torch.full((3 * CHUNK,), 255, dtype=torch.uint8, device=device)
            time.sleep(0.0005)  # A device that is lazy would have a queue of a minute.
    assert (nvme_path / "file").read_bytes() == b"".join(expected)


def test_a_file_that_is_too_short(device: str, handle: AsyncIOHandle, nvme_path: Path) -> None:
    (nvme_path / "file").write_bytes(b"x" * 5000)
    with handle.open(nvme_path / "file") as file:
        with pytest.raises(SwapIOError) as raised:
            handle.read(file, torch.zeros(9 * CHUNK, dtype=torch.uint8, device=device)).wait()
        assert raised.value.errno == errno.ENODATA
        target = torch.zeros(5000, dtype=torch.uint8, device=device)
        assert handle.read(file, target).wait() == 5000
        assert bool(target.eq(ord("x")).all())


def test_pinned_device_memory(device: str, handle: AsyncIOHandle, nvme_path: Path) -> None:
    if not isinstance(handle, GDSHandle):
        pytest.skip("nothing is pinned without cuFile")
    memory = torch.zeros(4 * CHUNK, dtype=torch.uint8, device=device)
    pinned = handle.pin(memory)
    assert handle.gds_available or not pinned
    source, target = memory[: 2 * CHUNK], memory[2 * CHUNK :]
    source.copy_(random_bytes(2 * CHUNK, device))
    with handle.open(nvme_path / "file", "rw") as file:
        handle.write(file, source[100:], 100).wait()
        handle.read(file, target[100:], 100).wait()
    assert torch.equal(source[100:], target[100:])
    assert handle.unpin(memory) == pinned


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_faults_on_the_way_of_device_tensors(device: str, nvme_path: Path, seed: int) -> None:
    plan = FaultPlan(seed=seed, short=0.3, eio=0.01, eintr=0.1, delay_us=500, reorder=True)
    outcomes = set()
    with AsyncIOHandle(block_bytes=1 << 18, faults=plan) as handle, handle.open(nvme_path / "file", "rw") as file:
        for turn in range(20):
            source = random_bytes(5 * CHUNK + 7, device, turn)
            target = torch.zeros_like(source)
            try:
                handle.write(file, source, 9).wait()
                handle.read(file, target, 9).wait()
            except SwapIOError as error:
                outcomes.add(error.errno)
            else:
                outcomes.add(0)
                assert torch.equal(source, target)
    assert outcomes <= {0, errno.EIO} and outcomes


def test_memory_of_the_host_can_be_locked_again_after_close(device: str, nvme_path: Path) -> None:
    for _ in range(3):
        with AsyncIOHandle() as handle, handle.open(nvme_path / "file", "rw") as file:
            handle.write(file, random_bytes(1000, device)).wait()
